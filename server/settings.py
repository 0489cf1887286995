"""Every setting of the server, declared once: flags, environment variables and YAML keys all come from here.

`server.options` turns the fields into command-line flags and reads the other sources. To add a setting,
add a field; its group orders the help text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from server import setting_checks as checks
from server.speculative_config import SpeculativeConfig, checked_policy

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

Port = Annotated[int, Field(ge=0, le=65535)]


def _auto_is_none(value: Any) -> Any:
    return None if value == "auto" else value


AutoInt = Annotated[int | None, BeforeValidator(_auto_is_none)]
AutoFloat = Annotated[float | None, BeforeValidator(_auto_is_none)]


def option(default: Any, group: str, help: str, *, metavar: str | None = None, **bounds: Any) -> Any:
    """A settings field with what the command line needs to know about it."""
    return Field(
        default=default, description=help, json_schema_extra={"group": group, "metavar": metavar}, **bounds
    )


class Settings(BaseModel):
    """The configuration of one server process, complete and checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Model
    model: str | None = option(
        None,
        "Model",
        f"model directory or repository name (default: {DEFAULT_MODEL}, fetched from the package registry)",
    )
    served_model_name: list[str] = option(
        [],
        "Model",
        "names that clients may ask for; the first one is reported (default: MODEL)",
        metavar="NAME",
    )
    tokenizer: str | None = option(
        None, "Model", "directory or repository of the tokenizer (default: MODEL's)", metavar="PATH"
    )
    chat_template: str | None = option(
        None,
        "Model",
        "Jinja chat template, as a file or as text (default: the tokenizer's)",
        metavar="FILE|TEXT",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "mistral_args"] = option(
        "auto", "Model", "how the model writes tool calls (default: as its chat template shows)"
    )
    reasoning_parser: Literal["auto", "think", "none"] = option(
        "auto",
        "Model",
        "think: the model's thoughts, from <think> to </think>, are answered as reasoning_content (default: "
        "where its chat template has them)",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Model", "type of weights and KV cache; auto is what suits the device"
    )
    executor: Literal["auto", "cuda", "native", "torch"] = option(
        "auto",
        "Model",
        "what computes: cuda is one GPU, native are the C++ kernels for CPUs; auto takes the first that runs",
    )
    quantization: Literal["auto", "bf16", "gguf"] = option(
        "auto",
        "Model",
        "weights of the native executor: rounded to bf16, or the blocks of the GGUF file as they are; auto "
        "takes the blocks where it can",
    )
    max_model_len: AutoInt = option(
        None,
        "Model",
        "longest context, prompt and answer together (default: the model's)",
        metavar="TOKENS",
        ge=1,
    )
    seed: AutoInt = option(
        None, "Model", "seed of the requests that bring none (default: fresh at every start)", ge=0, lt=2**63
    )
    max_logprobs: int = option(20, "Model", "most alternatives that a request may ask for", ge=0, le=100)
    cache_dir: str | None = option(
        None,
        "Model",
        "where fetched models and measured profiles are kept (default: ~/.cache/dspark)",
        metavar="DIR",
    )

    # Batching and memory
    max_num_seqs: int = option(32, "Batching and memory", "most sequences in one step", ge=1, le=4096)
    max_num_batched_tokens: AutoInt = option(
        None,
        "Batching and memory",
        "most tokens in one step, drafts included (default: what suits the device)",
        metavar="TOKENS|auto",
        ge=1,
    )
    num_pages: AutoInt = option(
        None,
        "Batching and memory",
        "pages of 16 tokens in the KV cache (default: from --kv-cache-memory)",
        metavar="PAGES|auto",
        ge=1,
    )
    kv_cache_memory: AutoFloat = option(
        None,
        "Batching and memory",
        "memory for the KV cache in GiB (default: from the container's limit, or --gpu-memory-utilization)",
        metavar="GIB|auto",
        gt=0,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Batching and memory",
        "share of the GPU's memory for weights, KV cache and all that a step needs, after a rehearsal of one",
        metavar="SHARE",
        gt=0,
        le=1,
    )
    enable_prefix_caching: bool = option(
        True, "Batching and memory", "reuse the pages of prompts that begin alike"
    )
    threads: int = option(
        0,
        "Batching and memory",
        "compute threads; 0 follows CPU affinity and the container's limit",
        ge=0,
        le=1024,
    )

    # Speculative decoding
    speculative_config: SpeculativeConfig = option(
        SpeculativeConfig(),
        "Speculative decoding",
        'how drafts are made, for example {"method": "ngram", "num_speculative_tokens": 5}; further keys: '
        "model, prompt_lookup_min, prompt_lookup_max, verify_policy, enable_adaptive_verification",
        metavar="JSON",
    )
    verify_policy: str | None = option(
        None,
        "Speculative decoding",
        "how many drafted tokens are verified: off, fixed:K, or by confidence and load: lookahead, lagged, "
        "algorithm1, threshold[:base=0.5,sensitivity=0.3,min=0,max=64] (default: lookahead, or fixed:K "
        "where num_speculative_tokens is given)",
        metavar="POLICY",
    )

    online_calibration: bool = option(
        False,
        "Speculative decoding",
        "correct the drafter's confidence slowly by what is accepted in service",
    )

    # HTTP
    host: str = option("127.0.0.1", "HTTP", "address to listen on; 0.0.0.0 for every interface")
    port: Port = option(8000, "HTTP", "port to listen on; 0 picks a free one")
    api_key: list[str] = option(
        [], "HTTP", "keys that /v1 accepts (default: open to all); prefer the environment", metavar="KEY"
    )
    api_key_file: str | None = option(
        None, "HTTP", "file with further keys, one a line; # begins a comment", metavar="FILE"
    )
    allowed_origins: list[str] = option(
        [], "HTTP", "web pages from these origins may use the server; * is any (CORS)", metavar="ORIGIN"
    )
    root_path: str = option(
        "", "HTTP", "path under which a proxy shows this server, for example /llm", metavar="PATH"
    )
    strict: bool = option(
        False, "HTTP", "refuse request fields that nobody knows (default: X-Ignored-Fields names them)"
    )
    stream_interval: int = option(
        1, "HTTP", "fewest tokens in a chunk of a stream, after its first", metavar="TOKENS", ge=1
    )
    enable_request_id_headers: bool = option(
        False, "HTTP", "answer with X-Request-Id, the client's own or a fresh one"
    )
    enable_playground: bool = option(True, "HTTP", "serve a page at / to try the model on")
    max_body_size: float = option(4.0, "HTTP", "largest request body in MiB", metavar="MIB", gt=0, le=1024)
    sse_keep_alive_interval: float = option(
        15.0, "HTTP", "seconds of silence before a stream gets a comment line; 0 is never", metavar="S", ge=0
    )
    ssl_certfile: str | None = option(
        None, "HTTP", "serve HTTPS with this certificate, PEM, chain included", metavar="FILE"
    )
    ssl_keyfile: str | None = option(
        None, "HTTP", "the certificate's private key, PEM (default: in --ssl-certfile)", metavar="FILE"
    )
    timeout_keep_alive: int = option(
        75,
        "HTTP",
        "seconds that an idle connection stays open; keep it above the load balancer's",
        metavar="S",
        ge=1,
    )

    # Overload and shutdown
    max_num_queued_reqs: int = option(
        256, "Overload and shutdown", "most choices that may wait; more get 503", metavar="N", ge=1
    )
    max_queue_wait: float = option(
        0.0,
        "Overload and shutdown",
        "seconds that a newcomer may have to wait, as far as one can tell; else 503 at once; 0 is no limit",
        metavar="S",
        ge=0,
    )
    key_rate_limit: float = option(
        0.0,
        "Overload and shutdown",
        "requests a minute that one API key, or address, may send; more get 429; 0 is no limit",
        metavar="N",
        ge=0,
    )
    key_concurrency_limit: int = option(
        0,
        "Overload and shutdown",
        "requests that one API key may have under way; more get 429; 0 is no limit",
        metavar="N",
        ge=0,
    )
    request_timeout: float = option(
        0.0, "Overload and shutdown", "seconds after which a request is ended; 0 is never", metavar="S", ge=0
    )
    shutdown_timeout: float = option(
        30.0, "Overload and shutdown", "seconds that running requests get on SIGTERM", metavar="S", ge=0
    )
    ready_step_limit: float = option(
        60.0,
        "Overload and shutdown",
        "seconds that one step may take before /ready says 503",
        metavar="S",
        gt=0,
    )

    # Logs and metrics
    log_format: Literal["text", "json"] = option(
        "text",
        "Logs and metrics",
        "how log lines are written; json is one object a line, with each request's id",
    )
    metrics_prefix: str = option(
        "dspark:", "Logs and metrics", 'prefix of the metric names; "vllm:" suits dashboards made for vLLM'
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "Logs and metrics", "how much is logged"
    )
    enable_per_request_metrics: bool = option(
        False, "Logs and metrics", 'answer with "metrics": how long the request took'
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = option(
        "none", "Logs and metrics", 'answer with "metrics": how the request\'s drafts fared'
    )
    enable_debug_endpoints: bool = option(
        False, "Logs and metrics", "serve /debug/scheduler: the last steps' decisions, as JSON"
    )
    enable_access_log: bool = option(True, "Logs and metrics", "log one line a request")
    otlp_traces_endpoint: str | None = option(
        None, "Logs and metrics", "send OpenTelemetry traces to this collector, over HTTP", metavar="URL"
    )

    _keys_are_some = field_validator("served_model_name", "api_key")(checks.no_blanks)
    _file_has_keys = field_validator("api_key_file")(checks.holds_keys)
    _path_is_absolute = field_validator("root_path")(checks.absolute_path)
    _prefix_fits = field_validator("metrics_prefix")(checks.metric_prefix)
    _template_exists = field_validator("chat_template")(checks.existing_template)
    _policy_is_known = field_validator("verify_policy")(checked_policy)

    @model_validator(mode="after")
    def _agreeing(self) -> Self:
        drafted, policy = self.speculative_config.num_speculative_tokens, self.policy
        asked = self.speculative_config.policy
        if self.verify_policy and asked and self.verify_policy != asked:
            raise ValueError(
                f"--verify-policy {self.verify_policy} and --speculative-config disagree: it says {asked}"
            )
        if drafted and policy and policy.removeprefix("fixed:").isdigit():
            verified = int(policy.removeprefix("fixed:"))
            if self.speculative_config.method != "off" and verified > drafted:
                raise ValueError(f"verify_policy {policy} verifies more than the {drafted} drafted tokens")
        return self

    @property
    def policy(self) -> str | None:
        """The verify policy that was asked for, by its own flag or within the speculative configuration."""
        return self.verify_policy or self.speculative_config.policy

    @property
    def model_names(self) -> list[str]:
        """The names under which clients may ask for the model."""
        return self.served_model_name or [self.model or DEFAULT_MODEL]

    @property
    def api_keys(self) -> list[str]:
        """All keys, those of the file included."""
        return self.api_key + (checks.keys_in(self.api_key_file) if self.api_key_file else [])

    @property
    def chat_template_text(self) -> str | None:
        """The template itself, read from its file if one was named."""
        if self.chat_template is None or checks.is_template_text(self.chat_template):
            return self.chat_template
        with open(self.chat_template, encoding="utf-8") as file:
            return file.read()
