"""The flat directory SGLang loads: the same drafter as a Llama config with ``midlayer.`` names.

Read from SGLang 0.5.23: ``srt/models/llama_eagle3.py`` (names and shapes; ``midlayer`` is what
every version of it knows, and unmatched names are skipped without a word),
``spec_aux_hidden_state.py`` (layer ids come from ``eagle_config`` alone), and the verifier's
``set_eagle3_layers_to_capture`` (``family.sglang_captures``). vLLM loads the same directory and
takes the ids at the top level first, so the two engines' ids may differ and both be right.
"""

from __future__ import annotations

from typing import Any

from .config import DrafterSection
from .contract import Wiring
from .drafter import layer_config
from .errors import ConfigError
from .export import Form, speculators_form
from .family import sglang_layer_ids
from .script import log
from .verifier import Verifier

SGLANG = "sglang"
_LAYER, _MIDLAYER = "layers.0.", "midlayer."


def servable_forms(
    drafter: DrafterSection, wiring: Wiring, verifier: Verifier, **sizes: int
) -> list[Form]:
    """speculators' form, and the flat one unless SGLang cannot be told this drafter's layers.

    Args:
        sizes: ``draft_vocab_size``, ``vocab_size``, ``num_speculative_tokens``.
    """
    forms = [speculators_form(drafter, wiring, **sizes)]
    try:
        forms.append(flat_form(drafter, wiring, verifier.text_config, **sizes))
    except ConfigError as error:
        log("no directory for SGLang; vLLM's is not concerned", why=str(error))
    return forms


def written_layer_ids(
    drafter: DrafterSection, wiring: Wiring, text_config: dict[str, Any]
) -> list[int]:
    """The layer ids that make SGLang capture the drafter's.

    Args:
        text_config: the verifier's decoder.

    Raises:
        ConfigError: SGLang would serve another drafter.
    """
    if drafter.norm_before_residual:
        raise _not_expressible(
            "drafter.norm_before_residual",
            "false: SGLang's EAGLE-3 layer does not implement it",
            "true",
        )
    ids = list(wiring.aux_layer_ids)
    written_ids = sglang_layer_ids(ids, text_config)
    if written_ids is None:
        model_type = text_config.get("model_type")
        raise _not_expressible(
            "capture.aux_layer_ids",
            "layers SGLang can be told: for DeepSeek and Kimi verifiers the first from 2 on "
            "(it adds one to ids that begin with 1), for Llama verifiers any",
            f"{ids}, a {model_type} verifier",
        )
    return written_ids


def _not_expressible(where: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        "SGLang cannot serve this drafter as it was trained",
        where=where,
        expected=expected,
        found=found,
        fix="serve with vLLM, or capture and train again for SGLang",
    )


def flat_form(
    drafter: DrafterSection,
    wiring: Wiring,
    text_config: dict[str, Any],
    *,
    draft_vocab_size: int,
    vocab_size: int,
    num_speculative_tokens: int,
) -> Form:
    """The flat form, which SGLang loads, and vLLM too.

    Everything at the top level, no ``target_hidden_size`` (null breaks vLLM) and no ``auto_map``.
    ``num_speculative_tokens`` is for people: engines are told on their command line.

    Args:
        text_config: the verifier's decoder.

    Raises:
        ConfigError: SGLang would serve another drafter.
    """
    ids_key = "eagle_aux_hidden_state_layer_ids"
    config = {
        **layer_config(drafter, vocab_size),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocab_size,
        "num_aux_hidden_states": len(wiring.aux_layer_ids),
        ids_key: list(wiring.aux_layer_ids),
        "eagle_config": {
            "use_aux_hidden_state": True,
            ids_key: written_layer_ids(drafter, wiring, text_config),
        },
        "norm_before_residual": drafter.norm_before_residual,
        "norm_before_fc": drafter.norm_before_fc,
        "fc_norm": drafter.fc_norm,
        "norm_output": drafter.norm_output,
        "num_speculative_tokens": num_speculative_tokens,
    }
    return Form(SGLANG, config, flat_name)


def flat_name(name: str) -> str:
    """A tensor's name in the flat form.

    >>> flat_name("layers.0.mlp.up_proj.weight")
    'midlayer.mlp.up_proj.weight'
    """
    return name.replace(_LAYER, _MIDLAYER)


def speculators_name(name: str) -> str:
    """A stored tensor's name in speculators' form, whichever form it was stored in.

    >>> speculators_name("midlayer.mlp.up_proj.weight"), speculators_name("fc.weight")
    ('layers.0.mlp.up_proj.weight', 'fc.weight')
    """
    return name.replace(_MIDLAYER, _LAYER)
