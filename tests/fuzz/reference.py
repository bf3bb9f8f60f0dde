"""The reference of the library layer: transformers' model, PEFT's adapters and torch's AdamW, in float64."""

from __future__ import annotations

import math
import warnings
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.fuzz.draws import EXPERTS, Spec

IGNORED = -100
Batch = dict[str, Tensor]


class AllFloat64(TorchFunctionMode):
    """Leaves float64 tensors in float64 where transformers casts to float32: in norms, softmax and routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def hf_config(spec: Spec) -> Any:
    """Return transformers' config of the spec."""
    from transformers import CONFIG_MAPPING

    values = {name: value for name, value in spec["config"].items() if name != "model_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[spec["config"]["model_type"]](**values)


def stages_of(spec: Spec) -> Spec:
    """Return how many ranks and stages a pipeline has."""
    return spec.get("stages", {"size": 1, "chunks": 1, "layout": None})


def batches(spec: Spec, step: int) -> list[Batch]:
    """Return the micro-batches of all data-parallel ranks in one step: rank r has every D-th one from r on."""
    replicas = spec["ranks"] // (spec["tensor"] * stages_of(spec)["size"])
    shape = spec["batch"]
    generator = torch.Generator().manual_seed(spec["seed"] + 1000 * step)
    return [_batch(spec, generator, index) for index in range(shape["micro_batches"] * replicas)]


def _batch(spec: Spec, generator: torch.Generator, index: int) -> Batch:
    shape, vocab = spec["batch"], spec["config"]["vocab_size"]
    rows, length = shape["rows"], shape["length"]
    ids = torch.randint(vocab, (rows, length), generator=generator)
    labels = ids.clone()
    if shape["labels"] == "some":
        labels[torch.rand(rows, length, generator=generator) < 0.4] = IGNORED
    if shape["labels"] == "first micro-batch" and index % 2:
        labels[:] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    cut = int(torch.randint(1, length, (), generator=generator))
    if shape["kind"] == "padded":
        mask = torch.ones_like(ids)
        # Row 0 is padded on the right, row 1 on the left. What a padded position predicts is ignored.
        mask[0, cut:] = 0
        labels[0, cut:] = IGNORED
        if rows > 1:
            mask[1, : length - cut] = 0
            labels[1, : length - cut + 1] = IGNORED
        batch["attention_mask"] = mask
    if shape["kind"] == "positions":
        positions = torch.arange(length).repeat(rows, 1)
        positions[0] += 5
        positions[-1, cut:] -= cut
        batch["position_ids"] = positions
        # Without a mask transformers takes positions that start again for documents; the library has cu_seqlens.
        batch["attention_mask"] = torch.ones_like(ids)
    if shape["kind"] == "documents":
        # Each row has two documents, the last row one.
        starts = [row * length + start for row in range(rows) for start in ((0, cut) if row < rows - 1 else (0,))]
        batch["cu_seqlens"] = torch.tensor([*starts, rows * length])
    return batch


def documents(batch: Batch) -> list[Batch]:
    """Return each document of a batch as a batch of its own, or the batch if it has none."""
    if "cu_seqlens" not in batch:
        return [batch]
    bounds = batch["cu_seqlens"].tolist()
    ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    return [{"input_ids": ids[None, a:b], "labels": labels[None, a:b]} for a, b in pairwise(bounds)]


def trained_tokens(step: list[Batch]) -> int:
    """Return the number of labels that the step trains, at least 1."""
    parts = [part for batch in step for part in documents(batch)]
    return max(1, sum(int((part["labels"][:, 1:] != IGNORED).sum()) for part in parts))


def build(spec: Spec) -> nn.Module:
    """Return transformers' model with weights that depend on the seed alone, in fp32."""
    from transformers import AutoModelForCausalLM

    config = hf_config(spec)
    config._experts_implementation = "eager"  # the grouped matmul has no float64
    torch.manual_seed(spec["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.train()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.3 * torch.randn(param.shape))
            # Weights that every dtype of the spec has exactly.
            param.copy_(param.bfloat16())
    return model


def add_peft(model: nn.Module, spec: Spec) -> dict[str, nn.Parameter]:
    """Add PEFT's adapters with random factors; return the factors by our names."""
    import peft

    lora = spec["lora"]
    config = peft.LoraConfig(
        r=lora["lora_rank"],
        lora_alpha=lora["lora_alpha"],
        target_modules=list(lora["target_modules"]),
        use_rslora=lora["use_rslora"],
    )
    wrapped: nn.Module = peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
    factors: dict[str, nn.Parameter] = {}
    for name, param in wrapped.named_parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.1)
            with torch.no_grad():
                param.copy_(param.bfloat16())
            factors[name.removeprefix("base_model.model.").replace(".default", "")] = param
    return factors


def router_loss(step: list[list[Tensor]], masks: list[Tensor | None], spec: Spec) -> Tensor:
    """Return the mean of the routers' losses over the micro-batches of a step, from the definitions.

    Args:
        step: for each micro-batch the logits of each MoE layer, ``[B, S, E]``.
        masks: for each micro-batch the tokens that count, ``[B, S]``; None for all.
        spec: of the draw.
    """
    moe = spec["moe"]
    config = spec["config"]
    top_k = config["num_experts_per_tok"]
    scale = moe["moe_aux_loss_coeff"]
    kind = moe["moe_router_load_balancing_type"]
    total = torch.zeros((), dtype=step[0][0].dtype)
    layers_of_all = [[_sums(layer, mask, top_k) for layer in layers] for layers, mask in zip(step, masks, strict=True)]
    experts = step[0][0].size(-1)
    for sums in layers_of_all:
        for tokens, z, scores, chosen in sums:
            if moe["moe_z_loss_coeff"]:
                total = total + moe["moe_z_loss_coeff"] * z.sum() / tokens.sum().clamp(min=1)
            if kind == "aux_loss":
                total = total + scale * experts / top_k * _product(chosen.sum(0), scores.sum(0), tokens.sum())
            if kind == "seq_aux_loss":
                rows = [_product(c, s, t) for c, s, t in zip(chosen, scores, tokens, strict=True)]
                total = total + scale * experts / top_k * sum(rows) / (tokens > 0).sum().clamp(min=1)
        if kind == "hf_aux_loss":
            tokens, _, scores, chosen = (torch.cat(parts) for parts in zip(*sums, strict=True))
            total = total + scale * experts * _product(chosen.sum(0), scores.sum(0), tokens.sum())
    total = total / len(step)
    if kind == "global_aux_loss":
        for sums in zip(*layers_of_all, strict=True):
            tokens, _, scores, chosen = (torch.cat(parts) for parts in zip(*sums, strict=True))
            total = total + scale * experts / top_k * _product(chosen.sum(0), scores.sum(0), tokens.sum())
    return total


def _product(chosen: Tensor, scores: Tensor, tokens: Tensor) -> Tensor:
    """Return sum_e f_e P_e; 0 without tokens."""
    tokens = tokens.clamp(min=1)
    return (chosen / tokens * (scores / tokens)).sum()


def _sums(logits: Tensor, mask: Tensor | None, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each row: tokens, squared log-sum-exps, scores ``[B, E]`` and choices ``[B, E]``."""
    weights = torch.ones_like(logits[..., 0]) if mask is None else mask.to(logits.dtype)
    scores = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter_(-1, logits.detach().topk(top_k, dim=-1).indices, 1.0)
    each = weights.unsqueeze(-1)
    return (
        weights.sum(1),
        (logits.logsumexp(-1).square() * weights).sum(1),
        (scores * each).sum(1),
        (chosen * each).sum(1),
    )


def step_loss(model: nn.Module, step: list[Batch], spec: Spec) -> Tensor:
    """Return the loss of all micro-batches: the mean over the trained tokens, and the routers' losses."""
    losses, logits, masks = [], [], []
    has_experts = spec["config"]["model_type"] in EXPERTS
    for batch in step:
        routers: list[list[Tensor]] = []
        for part in documents(batch):
            inputs: dict[str, Any] = {name: value for name, value in part.items() if name != "labels"}
            if has_experts:
                inputs["output_router_logits"] = True
            output = model(**inputs, use_cache=False)
            targets = F.pad(part["labels"], (0, 1), value=IGNORED)[:, 1:].flatten()
            losses.append(F.cross_entropy(output.logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum"))
            if has_experts:
                routers.append(list(output.router_logits))
        if has_experts:
            shape = (*batch["input_ids"].shape, -1)
            # The documents of a row are one sequence of the balancing losses.
            logits.append([torch.cat(layer).view(shape) for layer in zip(*routers, strict=True)])
            masks.append(batch.get("attention_mask"))
    loss = torch.stack(losses).sum() / trained_tokens(step)
    if has_experts:
        loss = loss + router_loss(logits, masks, spec)
    return loss


def groups_of(named: dict[str, Any], spec: Spec) -> list[dict[str, Any]]:
    """Return the parameter groups of the spec: a parameter is in the first group whose pattern matches it."""
    members: list[list[Any]] = [[] for _ in spec["optimizer"]["groups"]]
    for name, param in named.items():
        for index, (pattern, _, _) in enumerate(spec["optimizer"]["groups"]):
            if fnmatchcase(name, pattern):
                members[index].append(param)
                break
    groups = zip(members, spec["optimizer"]["groups"], strict=True)
    return [{"params": params, "weight_decay": row[1], "factor": row[2]} for params, row in groups if params]


def learning_rate(spec: Spec, step: int) -> float:
    """Return the learning rate of a step; each step has another one."""
    return spec["optimizer"]["lr"] * (1 - 0.25 * step)


def train(spec: Spec, dtype: torch.dtype) -> dict[str, Any]:
    """Train with torch.optim.AdamW on masters of at least fp32.

    Returns:
        ``initial``, ``weights`` and ``gradients`` (of the first step, before clipping) by name, and
        ``losses`` and ``norms`` of the steps.
    """
    model = build(spec)
    if dtype != torch.float64:
        # Eager attention sums P.dP in backward, where one operator and tiles take dO.O: with peaked softmaxes their
        # gradients of keys are 10 times as far from float64 (measured), and as far as each other.
        cast(Any, model).set_attn_implementation("sdpa")
    named = dict(model.named_parameters())
    initial = {name: param.detach().clone() for name, param in named.items()}
    trained: dict[str, nn.Parameter] = named
    if spec["lora"]:
        trained = add_peft(model, spec)
        initial |= {name: param.detach().clone() for name, param in trained.items()}
    # Parameters alone: tables of RoPE stay in fp32, as in the library.
    for param in model.parameters():
        param.data = param.data.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    masters = {name: nn.Parameter(param.detach().to(wide)) for name, param in trained.items()}
    options = spec["optimizer"]
    optimizer = torch.optim.AdamW(
        groups_of(masters, spec), lr=0.0, betas=tuple(options["betas"]), eps=options["eps"], foreach=False
    )
    result: dict[str, Any] = {"initial": initial, "losses": [], "norms": []}
    for step in range(spec["steps"]):
        with AllFloat64():
            loss = step_loss(model, batches(spec, step), spec)
        loss.backward()
        for name, param in trained.items():
            masters[name].grad = torch.zeros_like(masters[name]) if param.grad is None else param.grad.to(wide)
            param.grad = None
        if step == 0:
            result["gradients"] = {name: torch.clone(cast(Tensor, param.grad)) for name, param in masters.items()}
        result["losses"].append(loss.item())
        result["norms"].append(_clip(masters, options).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step) * group["factor"]
        optimizer.step()
        with torch.no_grad():
            for name, param in trained.items():
                param.copy_(masters[name])
    result["weights"] = {name: param.detach() for name, param in trained.items()}
    return result


def _clip(masters: dict[str, nn.Parameter], options: Spec) -> Tensor:
    """Clip the gradients; return the norm before."""
    gradients = [param.grad for param in masters.values() if param.grad is not None]
    norm_type = math.inf if options.get("norm") == "inf" else 2.0
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in gradients]), norm_type)
    if options["clip"] is not None:
        for grad in gradients:
            grad.mul_((options["clip"] / (norm + 1e-6)).clamp(max=1.0))
    return norm
