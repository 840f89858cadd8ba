"""Capture on a verifier of Kimi's kind: MLA, experts, a text model inside a multimodal one.

The reference is transformers' DeepSeek-V3 (the same decoder under other tensor names), and vLLM's
own path for hidden states, on the same engine settings. The INT4 form runs nowhere here: what is
shown is that its experts, decompressed, are the bfloat16 form's. INT4 kernels only a GPU can show.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.capture import VerifierHead, capture_rows
from eagle3.config_file import load_config
from eagle3.contract import Wiring
from eagle3.engine import Engine, Sampling
from eagle3.errors import ConfigError
from eagle3.verifier import Verifier
from tools.decompress_experts import decompress_directory

pytestmark = pytest.mark.slow
LENGTHS_TOKENS = [3, 150, 7, 64, 31, 200, 1, 90, 12, 45, 128, 17, 5, 77, 2, 33]
AUX_LAYER_IDS = [1, 2, 3, 4]


def config_for(directory: Path, dtype: str = "bfloat16"):
    return load_config(
        Path("configs/tiny_kimi_cpu.yaml"),
        (
            f"verifier.path={directory}",
            f"verifier.dtype={dtype}",
            "engine.max_num_batched_tokens=256",
            "engine.max_num_seqs=8",
            f"capture.aux_layer_ids={AUX_LAYER_IDS}",
        ),
    )


def captured(directory: Path, path: Path, dtype: str = "bfloat16"):
    """Every layer's states of rows of mixed lengths, several a batch."""
    config = config_for(directory, dtype)
    verifier = Verifier.open(config.verifier)
    engine = Engine(config, verifier)
    shard = capture_rows(
        engine,
        Wiring.at_capture(config, verifier),
        VerifierHead(verifier, dtype),
        rows_of(verifier),
        path,
    )
    engine.close()
    return shard


def rows_of(verifier: Verifier) -> list[list[int]]:
    """Conversations of their own through the chat template, cut: rows start as served ones do."""
    rows = []
    for number, length in enumerate(LENGTHS_TOKENS):
        text = " ".join(f"Item {i * (number + 3)} lies on shelf {i}." for i in range(40))
        messages = [{"role": "user", "content": text}]
        rows.append(verifier.tokenizer.apply_chat_template(messages, return_dict=False)[:length])
    assert [len(row) for row in rows] == LENGTHS_TOKENS
    return rows


@pytest.fixture(scope="module")
def plain_dir(tiny_kimi_int4_dir, tmp_path_factory) -> Path:
    """The INT4 form with its experts decompressed."""
    directory = tmp_path_factory.mktemp("kimi") / "plain"
    decompress_directory(tiny_kimi_int4_dir, directory)
    return directory


@pytest.fixture(scope="module")
def bf16_shard(tiny_kimi_dir, tmp_path_factory):
    return captured(tiny_kimi_dir, tmp_path_factory.mktemp("bf16") / "shard-00000.safetensors")


@pytest.fixture(scope="module")
def reference(tiny_kimi_dir, tmp_path_factory):
    """transformers' DeepSeek-V3 in float64 on the same weights."""
    from transformers import DeepseekV3ForCausalLM

    directory = tmp_path_factory.mktemp("deepseek")
    text_config = json.loads((tiny_kimi_dir / "config.json").read_text())["text_config"]
    text_config["model_type"] = "deepseek_v3"
    (directory / "config.json").write_text(json.dumps(text_config))
    tensors = {}
    for path in tiny_kimi_dir.glob("*.safetensors"):
        tensors |= load_file(path)
    tensors = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model, loading = DeepseekV3ForCausalLM.from_pretrained(
        directory,
        dtype=torch.float64,
        experts_implementation="eager",  # the default multiplies no float64
        output_loading_info=True,
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    return model


def errors_against(reference, shard) -> torch.Tensor:
    """Relative errors ``[rows, layers + 1]``, aux layers in order and then the last state."""
    before_norm = {}
    hook = reference.model.norm.register_forward_pre_hook(
        lambda _, args: before_norm.update(state=args[0])
    )
    errors = []
    for index in range(shard.num_rows):
        ours = shard.row(index)
        with torch.no_grad():
            theirs = reference.model(ours.input_ids[None].long(), output_hidden_states=True)
        states = [theirs.hidden_states[k][0] for k in AUX_LAYER_IDS] + [before_norm["state"][0]]
        found = [*ours.aux_hidden_states.unbind(1), ours.last_hidden_states]
        pairs = zip(found, states, strict=True)
        errors.append([float((f.double() - s).norm() / s.norm()) for f, s in pairs])
    hook.remove()
    return torch.tensor(errors)


def test_every_layer_equals_transformers_in_float32(
    tiny_kimi_dir, reference, tmp_path, monkeypatch
):
    """Aux id k is hidden_states[k]; the last state, id num_layers, is what the final norm gets."""
    # Where the CPU has AMX, vLLM chooses kernels for MLA that take no float32.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    shard = captured(tiny_kimi_dir, tmp_path / "shard-00000.safetensors", "float32")
    errors = errors_against(reference, shard)
    print(f"largest relative error, by layer: {errors.amax(0).tolist()}")
    assert errors.max() < 1e-5


def test_every_layer_is_within_rounding_in_bfloat16(bf16_shard, reference):
    errors = errors_against(reference, bf16_shard)
    print(f"largest and mean relative error, by layer: {errors.amax(0)}, {errors.mean(0)}")
    assert errors.max() < 0.05
    # Each id is its own layer: a neighbour's state is much further away.
    states = bf16_shard.row(5)
    found = [*states.aux_hidden_states.float().unbind(1), states.last_hidden_states.float()]
    for earlier, later in zip(found, found[1:], strict=False):
        assert float((later - earlier).norm() / later.norm()) > 0.1


def test_states_are_those_vllm_itself_extracts(tiny_kimi_dir, bf16_shard, tmp_path, monkeypatch):
    """Bit for bit: the same batches went through the same kernels, and each path only copies.

    vLLM's path (speculative method ``extract_hidden_states`` and its connector) has the states
    written into a KV cache by slot and read back by block; ours is a hook on ``execute_model``.
    """
    import vllm

    layer_ids = [*AUX_LAYER_IDS, 5]
    monkeypatch.setattr(
        vllm,
        "LLM",
        partial(
            vllm.LLM,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,  # the only number it takes; rows end before any
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}
                },
            },
            kv_transfer_config={
                "kv_connector": "CpuHiddenStatesConnector",
                "kv_connector_module_path": "tests.cpu_connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(tmp_path),
                    "use_synchronization_lock": False,
                },
            },
        ),
    )
    config = config_for(tiny_kimi_dir)
    verifier = Verifier.open(config.verifier)
    rows = rows_of(verifier)
    engine = Engine(config, verifier)
    one_token = Sampling(temperature=0, max_new_tokens=1)
    assert len(list(engine.generate(rows, one_token))) == len(rows)
    # The connector hears of a request's end one step later: the last rows' in this one.
    list(engine.generate([[1]], one_token))
    engine.close()

    theirs = {int(path.name.split("-")[0]): load_file(path) for path in tmp_path.iterdir()}
    assert sorted(theirs) == list(range(len(rows)))
    for index, row in enumerate(rows):
        ours = bf16_shard.row(index)
        assert theirs[index]["token_ids"].tolist() == ours.input_ids.tolist() == row
        states = torch.cat([ours.aux_hidden_states, ours.last_hidden_states[:, None]], dim=1)
        assert torch.equal(theirs[index]["hidden_states"], states), index


def test_decompressed_experts_give_the_same_states(plain_dir, bf16_shard, tmp_path):
    shard = captured(plain_dir, tmp_path / "shard-00000.safetensors")
    for index in range(shard.num_rows):
        ours, theirs = shard.row(index), bf16_shard.row(index)
        assert torch.equal(ours.aux_hidden_states, theirs.aux_hidden_states)
        assert torch.equal(ours.last_hidden_states, theirs.last_hidden_states)


def test_int4_experts_have_no_kernel_on_cpu(tiny_kimi_int4_dir):
    config = config_for(tiny_kimi_int4_dir)
    with pytest.raises(ConfigError, match="no kernel") as error:
        Engine(config, Verifier.open(config.verifier))
    assert "GPU" in error.value.expected and "decompress_experts" in error.value.fix
