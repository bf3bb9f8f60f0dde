"""The comparison of precisions trains in each of them and records their losses next to each other."""

from __future__ import annotations

import csv
import sys

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from scripts.bench.races import precision
from tests.training.runs import LINES, LLAMA, byte_tokenizer, write_jsonl


@pytest.mark.slow
def test_rows_have_the_loss_of_each_precision(tmp_path, monkeypatch):
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    path = tmp_path / "rows.csv"
    data = write_jsonl(tmp_path / "lines.jsonl", LINES)
    options = ["--pretrained", str(model), "--dataset", data, "--tokens", "24", "--steps", "4", "--batch", "2"]
    options += ["--eval-sequences", "4", "--warmup-steps", "0", "--lr", "1e-2", "--csv", str(path), "--append"]
    monkeypatch.setattr(sys, "argv", ["precision.py", *options])
    precision.main()
    with path.open(newline="") as file:
        bf16, fp16 = csv.DictReader(file)
    assert (bf16["precision"], fp16["precision"]) == ("bf16-mixed", "16-mixed")
    assert bf16["steps"] == fp16["steps"] == "4" and bf16["percent"] == ""
    assert float(fp16["held_out_after"]) < float(fp16["held_out_before"])
    ratio = float(fp16["held_out_after"]) / float(bf16["held_out_after"])
    assert float(fp16["percent"]) == pytest.approx(100 * (ratio - 1), abs=1e-3)  # rounded to 3 places
