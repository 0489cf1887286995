"""Chat templates render as their models expect, inside a sandbox, and failures carry the template's words."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from engine import chat_template
from engine.chat_template import ChatTemplate, ChatTemplateError

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
USER = {"role": "user", "content": "hi"}


def test_generation_prompt() -> None:
    template = ChatTemplate(CHATML)
    assert template.render([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render([USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_continue_final_message() -> None:
    messages = [USER, {"role": "assistant", "content": "Sure, "}]
    text = ChatTemplate(CHATML).render(messages, continue_final_message=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure, "
    assert messages[1]["content"] == "Sure, "


def test_continue_a_message_in_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}!{% endfor %}"
    )
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "assistant", "content": parts}], continue_final_message=True) == "ab"
    assert parts[1]["text"] == "b"


@pytest.mark.parametrize("messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": []}]])
def test_nothing_to_continue(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatTemplateError, match="final message"):
        ChatTemplate("x").render(messages, continue_final_message=True)


def test_a_template_that_drops_the_final_message() -> None:
    with pytest.raises(ChatTemplateError, match="leaves out"):
        ChatTemplate("{{ messages[0].content }}").render([USER, USER], continue_final_message=True)


def test_null_fields_are_left_out() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls is defined }}")
    assert template.render([{**USER, "tool_calls": None}]) == "False"


def test_whitespace_and_loop_controls() -> None:
    source = (
        "{% for m in messages %}\n    {% if loop.index == 2 %}\n        {% break %}\n    {% endif %}\n"
        "{{ m.content }}\n{% endfor %}\n"
    )
    assert ChatTemplate(source).render([USER, USER]) == "hi\n"


def test_helpers_of_templates() -> None:
    tools = [{"name": "größe", "test": "<&>'"}]
    assert (
        ChatTemplate("{{ tools[0] | tojson }}").render([], tools=tools)
        == '{"name": "größe", "test": "<&>\'"}'
    )
    assert ChatTemplate("{{ tools is none }}").render([], tools=[]) == "True"
    year = datetime.datetime.now().year
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) in (str(year), str(year + 1))
    assert (
        ChatTemplate("{{ bos_token }}{{ enable_thinking }}").render([], bos_token="<s>", enable_thinking=1)
        == "<s>1"
    )


def test_generation_blocks_are_rendered_as_they_stand() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    assert ChatTemplate(source).render([USER, USER]) == "hi;hi;"


def test_the_templates_own_words() -> None:
    with pytest.raises(ChatTemplateError, match=r"^roles must alternate$"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ nothing.here }}",
        "{{ messages[5].content.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failures_and_escapes_are_errors(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template failed"):
        ChatTemplate(source).render([USER])


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_rendered_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    template = ChatTemplate("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="over 1000 characters"):
        template.render([USER])
