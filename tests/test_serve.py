"""Served runs: what vLLM counts is what the replay predicts, and answers do not change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import Drafter, open_verifier

from eagle3.acceptance import Acceptance
from eagle3.capture import MOST_ROUNDING, NEAR_TIE, VerifierHead
from eagle3.config_file import load_config
from eagle3.engine import Sampling, Step
from eagle3.lossless import compare
from eagle3.measured import put_together
from eagle3.published import Published
from eagle3.replay import Replay
from eagle3.serve import PromptSet, ServedRun, serve_with, serve_without
from eagle3.shards import ShardBuffer

NUM_DRAFTED, MAX_NEW_TOKENS, NUM_PROMPTS = 3, 40, 12
TEMPERATURE = 0.1  # at 1 a random verifier says anything, and no draft is accepted


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = range(8, 8 + NUM_PROMPTS)
    return [torch.randint(2, 512, (n,), generator=generator).tolist() for n in lengths]


def train_briefly(directory: Path, prompts: list[list[int]], **changes: Any) -> Drafter:
    """A drafter that is right often and wrong often on the verifier's greedy answers."""
    from speculators.losses import resolve_loss_config
    from transformers import LlamaForCausalLM

    verifier = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    last_states = []
    verifier.model.norm.register_forward_pre_hook(lambda _, args: last_states.append(args[0]))
    rows = []
    for prompt in prompts:
        with torch.no_grad():
            ids = verifier.generate(
                torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
            states = verifier(ids, output_hidden_states=True).hidden_states
        rows.append((ids, torch.cat([states[k] for k in (1, 2, 3)], -1), last_states[-1]))
    emitted = sorted({int(i) for ids, _, _ in rows for i in ids[0]})
    drafter = Drafter.random(open_verifier(directory), target_ids=emitted, **changes)

    trainable = [p for p in drafter.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    loss_config = resolve_loss_config("kl_div", "eager")
    for step in range(60):
        ids, aux, last = rows[step % (len(rows) // 2)]  # the other half is never seen
        _, loss, _ = drafter.model(
            hidden_states=aux[:, :-1],
            input_ids=ids[:, 1:],
            document_ids=torch.zeros(1, ids.shape[1] - 1, dtype=torch.long),
            loss_mask=torch.ones(1, ids.shape[1] - 1, dtype=torch.bool),
            verifier_last_hidden_states=last[:, 1:],
            ttt_steps=NUM_DRAFTED,
            loss_config=loss_config,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


GEOMETRIES = {
    # Attention 256 wide on a hidden size of 64, grouped heads.
    "wide": {"head_dim": 64},
    "flags": {
        "head_dim": 32,
        "num_key_value_heads": 4,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
    },
}


@pytest.fixture(scope="module")
def trained(tiny_verifier_dir) -> dict[str, Drafter]:
    """Both drafters, before an engine takes this process's threads.

    Tensors this small are twenty times slower on two threads.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    drafters = {
        name: train_briefly(tiny_verifier_dir, make_prompts(), **changes)
        for name, changes in GEOMETRIES.items()
    }
    torch.set_num_threads(num_threads)
    return drafters


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
def test_vllm_counts_what_replay_predicts(trained, write_config, tmp_path, name):
    """The whole of 06 on a float32 verifier, where there are no near ties: equal to the count, of
    every prompt, greedy and sampled; and every draft of vLLM's is the replay's."""
    drafter, prompts = trained[name], make_prompts()
    published = Published.open(drafter.export(tmp_path / "drafter"), drafter.verifier)
    config, verifier = load_config(write_config()), drafter.verifier
    sets = [
        PromptSet("greedy", prompts, Sampling(0, MAX_NEW_TOKENS), tmp_path),
        PromptSet("again", prompts, Sampling(0, MAX_NEW_TOKENS), tmp_path),
        PromptSet("sampled", prompts, Sampling(TEMPERATURE, MAX_NEW_TOKENS), tmp_path),
    ]
    head = VerifierHead(verifier, "float32")
    serve_with(config, verifier, published.directory, sets)
    serve_without(config, verifier, head, published.aux_layer_ids, sets)
    assert all(path.is_file() for each in sets for path in each.paths)
    replay = Replay(published, verifier.embed_tokens(), torch.float32)
    measured = {
        each.name: put_together(each, replay, head, NUM_DRAFTED, NUM_DRAFTED + 2) for each in sets
    }
    assert measured["again"].served.acceptance == measured["greedy"].served.acceptance
    assert measured["again"].served.answers == measured["greedy"].served.answers
    for each in sets:
        found = measured[each.name]
        served, recorded, matched = found.served.acceptance, found.recorded, found.matched
        assert recorded.num_drafts.sum() == served.num_drafts
        assert recorded.accepted.sum(0).tolist() == list(served.accepted_per_position)
        assert np.array_equal(matched.num_drafts, recorded.num_drafts)
        assert np.array_equal(matched.accepted, recorded.accepted)
        # Neither perfect nor hopeless, at every draft position: else equality would say little.
        shares = served.per_position
        assert 0.01 < shares[2] < shares[1] < shares[0] < 0.98, (each.name, shares)
        agreement = found.agreement
        assert agreement.compared.tolist() == agreement.equal.tolist() and agreement.first is None
        assert agreement.compared.min() > 50
        assert sum(step.num_tokens for step in found.served.steps) == found.served.num_tokens
        assert max(step.num_running for step in found.served.steps) == config.verify.concurrency
        if each.is_greedy:
            lossless = compare(each, found.served, found.baseline, head)
            assert (lossless.equal, lossless.unexplained) == (NUM_PROMPTS, 0)
    # Drawn anew, the answers accept what the verifier's probabilities say, within the noise.
    sampled = measured["sampled"]
    assert sampled.served.answers != measured["greedy"].served.answers
    difference = (sampled.expected.accepted - sampled.recorded.accepted).sum(1)
    assert abs(difference.mean()) < 3 * difference.std() / NUM_PROMPTS**0.5
    assert sampled.expected.acceptance_length != sampled.recorded.acceptance_length


@pytest.mark.slow
def test_a_drafter_served_otherwise_is_found_at_its_draft_position(trained, write_config, tmp_path):
    """vLLM serves a drafter whose rope turns faster than the files replayed say: chains part, and
    the comparison names the answers, the first draft and both top five."""
    drafter = trained["wide"]
    directory = drafter.export(tmp_path / "drafter")
    served = tmp_path / "served"
    shutil.copytree(directory, served)
    layer = json.loads((served / "config.json").read_text())
    layer["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 3.0
    (served / "config.json").write_text(json.dumps(layer))
    config, verifier = load_config(write_config()), drafter.verifier
    sets = [PromptSet("heldout", make_prompts(), Sampling(0, MAX_NEW_TOKENS), tmp_path)]
    head = VerifierHead(verifier, "float32")
    serve_with(config, verifier, served, sets)
    serve_without(config, verifier, head, drafter.wiring.aux_layer_ids, sets)
    replay = Replay(Published.open(directory, verifier), verifier.embed_tokens(), torch.float32)
    found = put_together(sets[0], replay, head, NUM_DRAFTED, NUM_DRAFTED)
    agreement = found.agreement
    assert agreement.equal[0] < agreement.compared[0]
    assert (agreement.near_ties <= agreement.compared - agreement.equal).all()
    first = agreement.first
    assert first["prompt"] in agreement.differing_answers and not first["is_near_tie"]
    assert first["drafted"] == [first["vllm"][0][0], first["replay"][0][0]]
    assert (
        first["context"]
        == found.predicted.tokens[first["prompt"]][
            max(0, first["token_position"] - 14) : first["token_position"] + 2
        ].tolist()
    )
    # The run it replays is the one that the right files would have given.
    right = Replay(Published.open(served, verifier), verifier.embed_tokens(), torch.float32)
    assert put_together(sets[0], right, head, NUM_DRAFTED, NUM_DRAFTED).agreement.first is None


def test_run_round_trips(tmp_path):
    steps = (Step(2, True, 2, 0.5), Step(1, False, 1, 1.0))
    for acceptance in (None, Acceptance(5, (3, 1))):
        run = ServedRun(((1, 2), (3,)), 1.5, acceptance, steps)
        run.save(tmp_path / "run.json")
        assert ServedRun.load(tmp_path / "run.json") == run
    assert run.tokens_per_s == 2.0


def publish_states(path: Path, last_states: torch.Tensor) -> None:
    """One row of ``len(last_states)`` tokens."""
    num_tokens = len(last_states)
    buffer = ShardBuffer.allocate([0], [num_tokens], num_aux=1, hidden_size=64, dtype=torch.float32)
    aux = torch.zeros(num_tokens, 64)
    buffer.put(torch.arange(num_tokens), torch.zeros(num_tokens).int(), [aux, last_states])
    buffer.publish(path)


def tied_state(head: VerifierHead) -> torch.Tensor:
    """A last state ``[64]`` on the border between two tokens: bisected until their logits meet."""
    generator = torch.Generator().manual_seed(0)
    low, high = torch.randn(2, 64, generator=generator)
    low_token = int(head.logits(low[None]).argmax())
    assert int(head.logits(high[None]).argmax()) != low_token
    for _ in range(30):
        middle = (low + high) / 2
        if int(head.logits(middle[None]).argmax()) == low_token:
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_difference_is_explained_only_at_a_near_tie_of_both(tmp_path, tiny_verifier_dir, dtype):
    head = VerifierHead(open_verifier(tiny_verifier_dir), dtype)
    prompt = [5, 6, 7]
    last = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    last[3] = tied_state(head)  # of answer[0]: it decides answer[1], and nothing else does
    prompt_set = PromptSet("test", [prompt], Sampling(0, 3), tmp_path)
    publish_states(prompt_set.states_path, last)
    logits = head.logits(last[3][None])[0]
    first, second, third = (int(i) for i in logits.topk(3).indices)
    assert logits[first] - logits[third] > 2 * NEAR_TIE[head.dtype] * logits[first].clamp_min(1)
    agreed = int(head.logits(last[2][None]).argmax())

    def compared(ours: tuple[int, ...], theirs: tuple[int, ...]):
        runs = (ServedRun((answer,), 1.0, None, ()) for answer in (ours, theirs))
        return compare(prompt_set, *runs, head)

    assert compared((agreed, first, 1), (agreed, first, 1)).equal == 1
    tie = compared((agreed, first, 1), (agreed, second, 2))  # what follows a tie may differ
    assert (tie.compared, tie.equal, tie.near_ties, tie.unexplained) == (1, 0, 1, 0)
    (parted,) = tie.differences
    assert parted["answer_position"] == 1 and parted["tokens"] == [first, second]
    assert parted["below_top_logit"][0] == 0 and parted["is_near_tie"]
    # One token of the two far below the top: an error, whichever run made it.
    assert compared((agreed, first), (agreed, third)).unexplained == 1
    assert compared((agreed, third), (agreed, first)).unexplained == 1
    # Equal where the tie is, different after it: that state is not tied.
    assert compared((agreed, first, first), (agreed, first, second)).unexplained == 1
    assert compared((agreed,), (agreed, first)).unexplained == 1  # one stops, the other goes on
    both = tie + compared((agreed, first), (agreed, third))
    assert (both.compared, both.near_ties, both.unexplained, len(both.differences)) == (2, 1, 1, 2)


def test_rounding_seen_where_both_runs_agree_explains_twice_as_much_where_they_part(
    tmp_path, tiny_verifier_dir
):
    head = VerifierHead(open_verifier(tiny_verifier_dir), "float32")
    prompt_set = PromptSet("test", [[5]], Sampling(0, 2), tmp_path)
    generator = torch.Generator().manual_seed(2)
    apart = NEAR_TIE[torch.float32] * (MOST_ROUNDING + 1) / 2  # more than a near tie, not too much
    tied = tied_state(head)

    def second_is_below(share: float) -> torch.Tensor:
        """A state beside the tie: its second token so far below the first, by share of it."""
        step = torch.randn(64, generator=generator)
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            best, second = head.logits((tied + middle * step)[None])[0].topk(2).values
            too_far = best - second > share * best.clamp_min(1)
            low, high = (low, middle) if too_far else (middle, high)
        return tied + low * step

    def unexplained(seen: float, parting: float) -> int:
        last = torch.stack([second_is_below(seen), second_is_below(parting), tied])
        publish_states(prompt_set.states_path, last)
        agreed, (best, second) = (head.logits(state[None])[0].topk(2).indices for state in last[:2])
        answers = ((int(agreed[1]), int(best)), (int(agreed[1]), int(second)))
        runs = (ServedRun((answer,), 1.0, None, ()) for answer in answers)
        return compare(prompt_set, *runs, head).unexplained

    assert unexplained(seen=0, parting=apart) == 1
    assert unexplained(seen=0.55 * apart, parting=apart) == 0
    assert unexplained(seen=0.45 * apart, parting=apart) == 1
    # A recomputation gone wrong explains nothing.
    assert unexplained(seen=0.5, parting=2 * MOST_ROUNDING * NEAR_TIE[torch.float32]) == 1


def test_what_bfloat16_explains_float32_does_not(tmp_path, tiny_verifier_dir):
    """Logits a hundredth apart may swap by bfloat16's rounding, never by float32's."""
    prompt_set = PromptSet("test", [[5]], Sampling(0, 1), tmp_path)
    found = {}
    for dtype in ("bfloat16", "float32"):
        head = VerifierHead(open_verifier(tiny_verifier_dir), dtype)
        exact = VerifierHead(open_verifier(tiny_verifier_dir), "float32")
        tied, generator = tied_state(exact), torch.Generator().manual_seed(5)
        for _ in range(1000):  # a state beside the tie, by a share of the logit between the two
            state = tied + 0.02 * torch.randn(64, generator=generator)
            best = exact.logits(state[None])[0].topk(2)
            share = (best.values[0] - best.values[1]) / best.values[0].clamp_min(1)
            if 2 * NEAR_TIE[torch.float32] < share < NEAR_TIE[torch.bfloat16] / 4:
                break
        publish_states(prompt_set.states_path, state[None])
        runs = (ServedRun(((int(i),),), 1.0, None, ()) for i in best.indices)
        found[dtype] = compare(prompt_set, *runs, head)
    assert (found["bfloat16"].near_ties, found["float32"].unexplained) == (1, 1)
