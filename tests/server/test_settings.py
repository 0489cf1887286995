"""Where settings come from, which source wins, and what is said about a wrong one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from server.options import SettingsError, add_flags, env_name, flag_name, load
from server.settings import DEFAULT_MODEL, Settings


def from_flags(*arguments: str, env: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load(vars(parser.parse_args(arguments)), env or {})


def test_defaults() -> None:
    settings = from_flags()
    assert settings == Settings()
    assert settings.model_names == [DEFAULT_MODEL]
    assert (settings.host, settings.port, settings.max_num_seqs) == ("127.0.0.1", 8000, 32)
    assert settings.speculative_config.method == "auto"
    assert settings.speculative_config.num_speculative_tokens is None


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nhost: from-file\nenable_prefix_caching: false\nthreads:\n")
    env = {"DSPARK_PORT": "3", "DSPARK_MAX_NUM_SEQS": "4", "DSPARK_CONFIG": str(file)}
    settings = from_flags("--port", "5", env=env)
    assert (settings.port, settings.max_num_seqs, settings.host) == (5, 4, "from-file")
    assert settings.enable_prefix_caching is False
    assert settings.threads == 0
    assert from_flags("--config", str(file)).port == 1


def test_every_field_has_flag_variable_and_key(tmp_path: Path) -> None:
    examples: dict[str, Any] = {
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 6}',
        "verify_policy": "fixed:3", "dtype": "float32",
        "executor": "torch", "quantization": "gguf", "gpu_memory_utilization": "0.7",
        "tool_call_parser": "mistral", "reasoning_parser": "think",
        "per_request_spec_decode_metrics": "summary",
        "uvicorn_log_level": "debug", "log_format": "json", "root_path": "/llm", "api_key_file": __file__,
        "chat_template": "{{ messages }}", "metrics_prefix": "x:",
    }  # fmt: skip
    for name, field in Settings.model_fields.items():
        boolean = field.annotation is bool
        value = "true" if boolean else examples.get(name, "7")
        expected = getattr(from_flags(env={env_name(name): value}), name)
        if name == "model":
            arguments = [value]
        else:
            arguments = [flag_name(name)] if boolean else [flag_name(name), value]
        assert getattr(from_flags(*arguments), name) == expected
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"{name.replace('_', '-')}: '{value}'\n")
        assert getattr(from_flags("--config", str(file)), name) == expected
        assert expected != field.default or boolean


def test_lists() -> None:
    assert from_flags("--served-model-name", "a", "b/c").served_model_name == ["a", "b/c"]
    assert from_flags(env={"DSPARK_SERVED_MODEL_NAME": "a, b"}).served_model_name == ["a", "b"]


def test_auto_and_switches() -> None:
    settings = from_flags(
        "m", "--num-pages", "auto", "--kv-cache-memory", "1.5", "--no-enable-prefix-caching"
    )
    assert (settings.num_pages, settings.kv_cache_memory, settings.enable_prefix_caching) == (
        None,
        1.5,
        False,
    )


def test_speculation(tmp_path: Path) -> None:
    ngram = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
    settings = from_flags("-sc", ngram)
    assert settings.speculative_config.prompt_lookup_max == 3
    assert settings.speculative_config.num_speculative_tokens == 4
    assert from_flags("-sc", ngram, "--verify-policy", "fixed:2").verify_policy == "fixed:2"
    assert from_flags("-sc", '{"method": "ngram"}', "--verify-policy", "fixed:9").verify_policy == "fixed:9"
    file = tmp_path / "config.yaml"
    file.write_text("speculative-config: {method: ngram, num_speculative_tokens: 3}\n")
    assert from_flags("--config", str(file)).speculative_config.num_speculative_tokens == 3


def test_chat_template_from_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}!")
    assert from_flags("--chat-template", str(file)).chat_template_text == "{{ messages }}!"
    assert from_flags("--chat-template", "{% if x %}").chat_template_text == "{% if x %}"


def test_kubernetes_service_links_are_no_setting() -> None:
    assert (
        from_flags(env={"DSPARK_PORT": "tcp://10.0.0.1:8000", "DSPARK_SERVICE_HOST": "10.0.0.1"}).port == 8000
    )


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["--port", "99999"], {}, ["--port", "65535", "99999"]),
        (["--port", "x"], {}, ["--port", "integer"]),
        ([], {"DSPARK_PORT": "x"}, ["DSPARK_PORT", "integer"]),
        ([], {"DSPARK_ENABLE_PREFIX_CACHING": "maybe"}, ["DSPARK_ENABLE_PREFIX_CACHING", "true or false"]),
        (["--max-num-seqs", "0"], {}, ["--max-num-seqs", "greater than or equal to 1"]),
        (["--dtype", "int3"], {}, ["--dtype", "bfloat16"]),
        (["-sc", "{"], {}, ["--speculative-config", "JSON"]),
        (["-sc", "[]"], {}, ["--speculative-config", "dictionary"]),
        (["-sc", '{"methd": "ngram"}'], {}, ["--speculative-config", "unknown key 'methd'"]),
        (["-sc", '{"method": "magic"}'], {}, ["--speculative-config", "method", "ngram"]),
        (["-sc", '{"method": "ngram", "num_speculative_tokens": 99}'], {}, ["num_speculative_tokens", "16"]),
        (["-sc", '{"prompt_lookup_min": 9}'], {}, ["prompt_lookup_min must not exceed"]),
        (["--verify-policy", "always"], {}, ["--verify-policy", "fixed:K"]),
        (
            ["-sc", '{"num_speculative_tokens": 5}', "--verify-policy", "fixed:9"],
            {},
            ["fixed:9", "5 drafted"],
        ),
        (["--kv-cache-memory", "lots"], {}, ["--kv-cache-memory", "number"]),
        (["--kv-cache-memory", "nan"], {}, ["--kv-cache-memory"]),
        (["--chat-template", "/no/such/file"], {}, ["--chat-template", "/no/such/file"]),
        (["--metrics-prefix", "1-a"], {}, ["--metrics-prefix", "letters"]),
        (["--served-model-name", ""], {}, ["--served-model-name"]),
        (["--api-key-file", "/no/such/file"], {}, ["--api-key-file", "/no/such/file"]),
        (["--api-key-file", "/dev/null"], {}, ["--api-key-file", "no key"]),
        (["--root-path", "llm"], {}, ["--root-path", "/llm"]),
        (["--root-path", "/llm/"], {}, ["--root-path", "slash"]),
        (["--root-path", "/v1"], {}, ["--root-path", "/v1"]),
        (["--config", "/no/such.yaml"], {}, ["/no/such.yaml", "No such file"]),
    ],
)
def test_wrong_values(arguments: list[str], env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        from_flags(*arguments, env=env)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 1", ["unknown key 'prot'"]),
        ("port: x", ["port in", "integer"]),
        ("port: [1]", ["port in"]),
        ("- a", ["mapping"]),
        ("a: [", ["not valid YAML"]),
        ("speculative_config: {method: ngram, x: 1}", ["unknown key 'x'"]),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, words: list[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError) as caught:
        from_flags("--config", str(file))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_policy_may_stand_in_the_speculative_configuration() -> None:
    def policy(config: str, *flags: str) -> str | None:
        return from_flags("-sc", config, *flags).policy

    assert policy("{}") is None
    assert policy('{"verify_policy": "lagged"}') == "lagged"
    assert policy('{"enable_adaptive_verification": true, "num_speculative_tokens": 7}') == "lookahead"
    assert policy('{"enable_adaptive_verification": false, "num_speculative_tokens": 7}') is None
    assert policy('{"enable_adaptive_verification": true, "method": "off"}') is None
    assert policy('{"draft_sample_method": "probabilistic"}', "--verify-policy", "off") == "off"
    assert policy('{"verify_policy": "lagged"}', "--verify-policy", "lagged") == "lagged"
    for config, *flags in (
        ('{"verify_policy": "sometimes"}',),
        ('{"verify_policy": "lagged"}', "--verify-policy", "off"),
        ('{"verify_policy": "lagged", "enable_adaptive_verification": true}',),
        ('{"verify_policy": "fixed:4", "num_speculative_tokens": 3}',),
        ('{"draft_sample_method": "greedy"}',),
    ):
        with pytest.raises(SettingsError, match=r"policy|adaptive|probabilistic"):
            policy(config, *flags)
