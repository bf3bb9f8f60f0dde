"""What a chat template makes of tool calls, empty contents and unusual entries: against rows written by hand for it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packing import NOT_TRAINED
from nxd_memopt.training.data.sources.conversations import conversation_text
from nxd_memopt.training.data.tokenize.chat import ConversationEncoder, TemplateError, rendered_spans
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from tests.training.chats import MARKED, TURNS, tokenizer
from tests.training.runs import END

CALL = "{% set f = c.function if c.function is defined else c %}"
TURN = "{% for m in messages %}<{{ m.role }}>{% CONTENT %}{% for c in m.tool_calls or [] %}" + CALL
ENDS = "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def template(call: str, content: str = "{{ m.content }}") -> str:
    return TOOLS + TURN.replace("{% CONTENT %}", content) + call + ENDS


# By the constructs of public templates: arguments encoded without a guard, guarded, concatenated, iterated.
ENCODED = template('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}')
GUARDED = template(
    "{{ f.name }}{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"
)
CONCATENATED = template("{{ f.name + '(' + f.arguments + ')' }}")
ITERATED = template("{{ f.name }}{% for k, v in f.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}")
NO_CALLS = TURNS.replace("m.content +", "(m.content or '') +")
# A message without content is known by none, as in DeepSeek-V3; or its length is asked for; or it is added.
BY_NONE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content + '' }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BY_LENGTH = template(
    "{{ f.name }}{{ f.arguments | tojson }}", "{% if m.content | length > 0 %}{{ m.content }}{% endif %}"
)
ADDED = template("{{ f.name }}{{ f.arguments | tojson }}", "{{ ':' + m.content }}")

OBJECT = {"city": "Ås", "days": 2}
TEXT = '{"city":"Ås", "days": 2}'
DUMPED = json.dumps(OBJECT, ensure_ascii=False)
NONE: Any = object()


def calls(arguments: Any, content: Any = "", *, nested: bool = True) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call_7f", "type": "function", "function": function} if nested else function
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content is NONE:
        del answer["content"]
    messages = [
        {"role": "user", "content": "Weather?"},
        answer,
        {"role": "tool", "name": "weather", "tool_call_id": "call_7f", "content": DUMPED},
        {"role": "assistant", "content": "Rain."},
    ]
    return {"messages": messages}


def row(values: dict[str, Any]) -> dict[str, Any]:
    """The conversation of a row, as the reader of all files gives it."""
    return json.loads(conversation_text(copy.deepcopy(values), "messages"))


def spans(jinja: str, values: dict[str, Any]) -> tuple[str, list[str]]:
    text, found = rendered_spans(tokenizer(jinja), row(values))
    return text, [text[start:end] for start, end in found]


def expected(jinja: str, values: dict[str, Any]) -> str:
    return tokenizer(jinja).apply_chat_template(values["messages"], tools=values.get("tools"), tokenize=False)


@pytest.mark.parametrize(
    ("jinja", "of_text", "of_object"),
    [
        (ENCODED, OBJECT, OBJECT),
        (GUARDED, TEXT, OBJECT),
        (CONCATENATED, TEXT, DUMPED),
        (ITERATED, OBJECT, OBJECT),
    ],
    ids=["encoded", "guarded", "concatenated", "iterated"],
)
@pytest.mark.parametrize("nested", [True, False])
def test_arguments_are_in_the_form_that_the_template_expects(
    jinja: str, of_text: Any, of_object: Any, nested: bool
) -> None:
    for given, right in ((TEXT, of_text), (OBJECT, of_object), ("{}", right_of_empty(of_text))):
        text, answers = spans(jinja, calls(given, nested=nested))
        assert text == expected(jinja, calls(right, nested=nested))
        assert len(answers) == 2 and "weather" in answers[0] and answers[1] == "Rain.<end>"


def right_of_empty(of_text: Any) -> Any:
    return {} if of_text is OBJECT else "{}"


@pytest.mark.parametrize(
    ("jinja", "right", "arguments"),
    [(ENCODED, "", OBJECT), (GUARDED, "", TEXT), (BY_NONE, None, TEXT), (BY_LENGTH, "", OBJECT), (ADDED, "", OBJECT)],
    ids=["encoded", "guarded", "by_none", "by_length", "added"],
)
@pytest.mark.parametrize("content", [None, NONE, ""])
def test_a_message_of_calls_alone_has_no_word_none(jinja: str, right: Any, arguments: Any, content: Any) -> None:
    text, _ = spans(jinja, calls(TEXT, content))
    assert text == expected(jinja, calls(arguments, right)) and "None" not in text


def test_arguments_that_are_no_object_are_named() -> None:
    assert spans(CONCATENATED, calls("Oslo"))[0] == expected(CONCATENATED, calls("Oslo"))
    with pytest.raises(
        TemplateError, match=r"encodes the arguments of a tool call in message 2 .*write them as an object"
    ):
        spans(ENCODED, calls("Oslo"))


USUAL = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
# Of system messages the first one, of messages of the assistant the reasoning after the last question.
REASONING = (
    "{% if messages[0].role in ('system', 'developer') %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>"
    "{% generation %}{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not enable_thinking %}<>{% endif %}"
)
ASSISTANTS = "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
REASONED = [USUAL[0], USUAL[1] | {"reasoning_content": "r"}]
FIRST_CALL = ENCODED.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
TWO = {"name": "f", "arguments": {"n": 1}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d"}}


@pytest.mark.parametrize(
    ("jinja", "values", "says"),
    [
        (ASSISTANTS, {"messages": [{"role": "developer", "content": "d"}, *USUAL]}, r"message 1 \(role developer\)"),
        (REASONING, {"messages": [*USUAL, {"role": "developer", "content": "d"}]}, r"message 3 \(role developer\)"),
        (TURNS, {"messages": REASONED}, "'reasoning_content' of message 2"),
        (REASONING, {"messages": REASONED * 2}, "'reasoning_content' of message 2"),
        (TURNS, {"messages": [USUAL[0] | {"name": "Ann"}, USUAL[1]]}, "'name' of message 1"),
        (TURNS, {"messages": USUAL, "tools": [TOOL]}, "the tools"),
        (NO_CALLS, calls(OBJECT, None), r"the name of a tool call in message 2"),
        (FIRST_CALL, {"messages": [USUAL[0], {"role": "assistant", "tool_calls": [{"function": TWO}] * 2}]},
         "the name of a tool call in message 2"),
        (TURNS, {"messages": USUAL, "chat_template_kwargs": {"thinking": True}}, "does not read 'thinking'"),
    ],
)  # fmt: skip
def test_what_the_template_leaves_out_is_named(jinja: str, values: dict[str, Any], says: str) -> None:
    says = says if says.startswith("does") else f"leaves out {says}.*data.chat_template"
    with pytest.raises(TemplateError, match=says):
        spans(jinja, values)


@pytest.mark.parametrize(
    ("jinja", "values"),
    [
        (REASONING, {"messages": [{"role": "developer", "content": "d"}, *REASONED]}),
        (TURNS, {"messages": [{"role": "developer", "content": "d"}, *USUAL]}),
        (TURNS, {"messages": [USUAL[0] | {"name": None, "parts": []}, USUAL[1]], "tools": None}),
        (ENCODED, {"messages": USUAL, "tools": [TOOL]}),
        # A template that looks into the text: that of the row decides.
        ("{% for m in messages %}{{ m.content.split('|')[1] + eos_token }}{% endfor %}",
         {"messages": [{"role": "user", "content": "|q"}, {"role": "assistant", "content": "|a"}]}),
    ],
)  # fmt: skip
def test_what_the_template_reads_is_trained_on(jinja: str, values: dict[str, Any]) -> None:
    kept = {**values, "messages": [{k: v for k, v in m.items() if v is not None} for m in values["messages"]]}
    assert spans(jinja, values)[0] == expected(jinja, kept)


def test_options_of_the_template_are_those_of_the_row() -> None:
    """Of both the text and the prompt of an answer; nulls of a table are no options."""
    jinja = TURNS.replace("{{ m.role[0]", "{{ (mood or '') + m.role[0]").replace(
        "%}a:", "%}{{ mood or quiet or '' }}a:"
    )
    made = tokenizer(jinja)
    for options in ({"mood": "glad", "quiet": None}, {}):
        text, found = rendered_spans(made, row({"messages": USUAL, "chat_template_kwargs": options}))
        kwargs = {name: value for name, value in options.items() if value is not None}
        assert text == made.apply_chat_template(USUAL, tokenize=False, **kwargs)
        assert [text[start:end] for start, end in found] == ["a<end>"]
    with pytest.raises(TemplateError, match="multiple values for keyword argument 'tools'"):
        rendered_spans(tokenizer(ENCODED), row({"messages": USUAL, "chat_template_kwargs": {"tools": [TOOL]}}))


@pytest.mark.parametrize(("name", "jinja"), [("trainable", TURNS), ("weight", MARKED)])
def test_answers_that_are_not_to_be_trained_are_not(jinja: str, name: str) -> None:
    turns = [*USUAL, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
    for off, on in ((0, 1), (False, True), (0.0, 1.0), (0, None)):
        messages = [turns[0] | {name: off}, turns[1] | {name: off}, turns[2], turns[3] | {name: on}]
        text, answers = spans(jinja, {"messages": messages})
        assert text == expected(jinja, {"messages": turns}) and answers == ["b<end>"]
    for message, says in (
        (turns[1] | {name: "no"}, rf'has {{"{name}": "no"}} in message 2: only true and 1'),
        (turns[1] | {name: 0.5}, rf'has {{"{name}": 0.5}} in message 2'),
        (turns[1] | {name: 0, "train": True, "weight": False}, "each entry in the same way"),
        (turns[1] | {name: 0}, "no message of the assistant that is trained"),
        ({"role": "user", "content": "q", name: 1}, "only messages of the assistant are trained"),
    ):
        others = [turns[1]] if "only" in says else []
        with pytest.raises(ValueError, match=says):
            conversation_text({"messages": [turns[0], message, *others]}, "messages")


def test_an_answer_that_is_not_to_be_trained_is_not_found() -> None:
    values = row({"messages": [USUAL[0], USUAL[1] | {"train": False}, *USUAL]})
    twice = MARKED.replace("{% generation %}", "{% generation %}-{% endgeneration %}{% generation %}")
    with pytest.raises(
        TemplateError, match="message 2 is not to be trained, and the chat template marks 4 ranges in 2"
    ):
        rendered_spans(tokenizer(twice), values)
    config = DataConfig(format="messages", train_on_input=True)
    encoder = ConversationEncoder(Vocabulary(tokenizer(TURNS), 257, END), config)
    found = encoder.encode([json.dumps(values)])[0]
    assert "message 2 is not to be trained, and data.train_on_input trains all tokens" in found.problem
    kept = ConversationEncoder(Vocabulary(tokenizer(TURNS), 257, END), DataConfig(format="messages"))
    tokens = kept.encode([json.dumps(values)])[0].tokens
    assert ((tokens & NOT_TRAINED) == 0).tolist() == [False] * (len(tokens) - 2) + [True] * 2
