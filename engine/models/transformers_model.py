"""Any other dense decoder, run by transformers' own code with its attention handed to the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from engine.models.base import Attend
from engine.models.config import ModelConfig
from engine.models.unsupported import UnsupportedModel
from engine.models.weights import CorruptModel

_NAME = "dspark_paged"
_ATTEND = "dspark_attend"  # travels to the attention function as an unknown keyword of the model's forward
# What some attention layers pass beyond softmax(q k) v; ignoring it would give wrong results silently.
_NOT_HANDLED = ("s_aux", "position_bias", "head_mask")
# transformers picks these frequencies by the longest text of the batch, so texts would affect each other.
_VARYING_ROPE = ("dynamic", "longrope")
_LAYER_LISTS = ("layers", "h")  # what families call the list of decoder layers


class TransformersModel:
    """engine.models.base.Model over AutoModelForCausalLM, for which the batch is a single packed row."""

    config: ModelConfig

    def __init__(self, config: ModelConfig, module: Any) -> None:
        """`module` is a transformers causal LM. Raises UnsupportedModel when it can't be run this way."""
        _register()
        self.config = config
        self._module = module.eval().requires_grad_(False)
        self._body: Any = getattr(module, module.base_model_prefix, None)
        lists = (getattr(self._body, name, None) for name in _LAYER_LISTS)
        self._layers: Any = next((found for found in lists if found is not None), None)
        if self._layers is None or not getattr(module, "_supports_attention_backend", False):
            raise UnsupportedModel(
                f"model type {config.model_type!r}: transformers doesn't let its attention be replaced"
            )
        if (config.rope_scaling or {}).get("rope_type") in _VARYING_ROPE:
            raise UnsupportedModel(
                f"model type {config.model_type!r}: rotary embeddings that change with a text's length "
                "are not supported: keys that are cached already would have to change with them"
            )
        module.set_attn_implementation(_NAME)
        self._check_seams()

    @classmethod
    def load(
        cls,
        folder: Path | str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        config: ModelConfig | None = None,
    ) -> TransformersModel:
        """Load the safetensors model in `folder`; `config` saves reading it.

        Raises as from_folder does, and CorruptModel for weights that cannot be read in full.
        """
        import transformers

        config = config or ModelConfig.from_folder(folder)
        try:
            module = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, trust_remote_code=False, use_safetensors=True, local_files_only=True
            )
        except SafetensorError as error:
            raise CorruptModel(f"{folder}: truncated or damaged ({error}); fetch the model again") from error
        return cls(config, module.to(device))

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens, positions [T] int64 -> (final-normed hidden [T, d], features [T, m*d] or None).

        Feature layer i is the raw output of decoder layer i (-1: what enters layer 0).
        Raises ValueError for a feature layer outside -1 ... num_layers - 2.
        """
        if not all(-1 <= layer < self.config.num_layers - 1 for layer in feature_layers):
            raise ValueError(
                f"feature layers {feature_layers} of a model with {self.config.num_layers} layers"
            )
        kept: dict[int, torch.Tensor] = {}
        hooks = [self._capture(layer, kept) for layer in dict.fromkeys(feature_layers)]
        try:
            output = self._body(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                return_dict=True,
                **{_ATTEND: attend},
            )
        finally:
            for hook in hooks:
                hook.remove()
        hidden: torch.Tensor = output.last_hidden_state[0]
        if not feature_layers:
            return hidden, None
        return hidden, torch.cat([kept[layer][0] for layer in feature_layers], dim=-1)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, d] -> [n, V] in fp32 (fp64 when the model runs in fp64), scaled or capped as the model does."""
        logits = self._module.get_output_embeddings()(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        config = self._module.config
        # The two things that causal LM heads do after the projection.
        divisor = getattr(config, "logits_scaling", None)
        if divisor:
            logits = logits / divisor
        factor = getattr(config, "logit_scale", None)
        if factor:
            logits = logits * factor
        cap = getattr(config, "final_logit_softcapping", None)
        result: torch.Tensor = cap * torch.tanh(logits / cap) if cap else logits
        return result

    @torch.inference_mode()
    def _check_seams(self) -> None:
        """Two rows both ways: every layer must ask for attention, and `logits` must be the whole head."""
        called: list[int] = []

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_rules: object
        ) -> torch.Tensor:
            called.append(layer)
            return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

        rows = torch.arange(2, device=self._module.device)
        hidden, _ = self.forward(rows, rows, attend)
        if sorted(called) != list(range(self.config.num_layers)):
            raise UnsupportedModel(
                f"model type {self.config.model_type!r}: not every layer has its own plain softmax attention"
            )
        theirs = self._module(
            input_ids=rows[None], position_ids=rows[None], use_cache=False, **{_ATTEND: attend}
        ).logits[0]
        ours = self.logits(hidden).to(theirs.dtype)
        # Wide enough for bf16; a step of the head that is missing here is off by far more.
        if ours.shape != theirs.shape or (ours - theirs).abs().max() > 0.03 * theirs.abs().max() + 1e-6:
            raise UnsupportedModel(
                f"model type {self.config.model_type!r}: its output head does more than this server knows of"
            )

    def _capture(self, layer: int, kept: dict[int, torch.Tensor]) -> Any:
        """Hook that keeps what `layer` puts out, [1, T, d], in `kept`."""

        def after(_module: Any, _args: Any, output: Any) -> None:
            kept[layer] = output[0] if isinstance(output, tuple) else output

        def before(_module: Any, args: Any, kwargs: Any) -> None:
            kept[layer] = args[0] if args else kwargs["hidden_states"]

        if layer == -1:
            # Not the embedding table's output: Gemma scales it, others add positions or multiply.
            return self._layers[0].register_forward_pre_hook(before, with_kwargs=True)
        return self._layers[layer].register_forward_hook(after)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Which keys a query sees is the caller's business: it knows the sequences in the packed row."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D]."""
    attend: Attend | None = kwargs.get(_ATTEND)
    given = [name for name in _NOT_HANDLED if kwargs.get(name) is not None]
    if attend is None or given:
        raise UnsupportedModel(
            f"{type(module).__name__}: attention with {', '.join(given)} is not supported"
            if given
            else f"{type(module).__name__} does not pass keywords on to its attention function"
        )
    out = attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None
