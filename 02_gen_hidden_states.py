"""Capture the verifier's hidden states over 01's token rows, with a patched vLLM worker.

reads   01_data/rows.safetensors      token rows, training and validation
writes  02_hidden/shard-00000.safetensors, ...
            aux_hidden_states   verifier dtype or 8 bits [num_tokens, num_aux, hidden]
            last_hidden_states  the same [num_kept, hidden], where training needs a target
            and the rest of eagle3/shard_layout.py

run     python 02_gen_hidden_states.py configs/smollm2_cpu.yaml
        python 02_gen_hidden_states.py CONFIG --worker 0/4   (to 3/4, together, on one shared disk)
time    the verifier's prefill rate: the demo's 120K tokens in about a minute
disk    up to (aux layers + 1) x hidden x 2 bytes a token, 57 KB for Kimi-K2.5; about half of it
        with capture.state_dtype int8

If it stops, run the same command again: published shards are kept, at most two are computed twice.
Worker i of n computes the shards whose number leaves i over n; whichever finds all of them proven
publishes the manifest, and so does a run without --worker, whoever made the shards.
"""

from eagle3.capture import VerifierHead, compute_shard, finish_shard, read_records
from eagle3.contract import Wiring
from eagle3.disk import require_free, require_room
from eagle3.engine import Engine
from eagle3.preflight import check
from eagle3.progress import Progress
from eagle3.retention import Rounds, free
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script, stop_flag
from eagle3.shard_plan import plain_bytes, plan_shards
from eagle3.shards import Shard
from eagle3.stage import Stage


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    if invocation.check:
        return check(config, "02_hidden", invocation)
    in_rounds = config.capture.round_tokens is not None
    with Stage(config, "02_hidden", invocation, in_rounds=in_rounds) as stage:
        if stage.done:
            return
        rows = TokenRows.load(stage.inputs["01_data"].path("rows.safetensors"))
        wiring = Wiring.at_capture(config, stage.verifier)
        plan = plan_shards(rows, config, wiring)
        results = {}
        if in_rounds:
            rounds = Rounds.now(plan, config)
            log("rounds", **rounds.to_json())
            others = [shard for shard in plan if not rounds.holds(shard)]
            free(stage.directory, others)
            freed = [shard.name for shard in others if shard.round_index < rounds.trained]
            results = {"rounds": rounds.to_json(), "freed": freed}
            plan = [shard for shard in plan if rounds.holds(shard)]
        records = read_records(stage.directory, plan)
        require_room(
            stage.directory,
            needed_bytes=sum(shard.num_bytes for shard in plan),
            kept_bytes=sum(record["bytes"] for record in records.values() if record),
            budget_bytes=config.capture.disk_budget_bytes,
        )
        worker = invocation.worker
        own = worker.part(plan) if worker else plan
        missing = [shard for shard in own if not records[shard.name]]
        if missing:
            for shard in missing:  # what a killed run wrote and could not prove
                (stage.directory / shard.name).unlink(missing_ok=True)
            own_tokens = sum(shard.num_tokens for shard in own)
            done_tokens = own_tokens - sum(shard.num_tokens for shard in missing)
            progress = Progress(own_tokens, "tokens", done=done_tokens)
            head = VerifierHead(stage.verifier, config.verifier.dtype)
            engine = Engine(config, stage.verifier)
            pending = None
            for shard in [*missing, None]:  # a shard is written while the next one is computed
                computed = None
                if shard is not None:
                    require_free(stage.directory, shard.num_bytes)
                    tokens = [rows.row(i)[0].tolist() for i in shard.row_ids]
                    computed = compute_shard(engine, wiring, shard, tokens, stage.directory)
                if pending is not None:
                    name, record = pending.path.name, finish_shard(engine, head, pending)
                    records[name] = record
                    progress.advance(record["tokens"], shard=name)
                pending = computed
                if stop_flag.signal_name and pending is not None:
                    finish_shard(engine, head, pending)
                stop_flag.raise_if_set()
            progress.close()
            log("captured", rate=f"{progress.rate:.0f} tokens/s")

        if worker is not None:
            records = read_records(stage.directory, plan)
            if not all(records.values()):
                return say_missing(invocation, len(own), records)
        total = {
            name: sum(record[name] for record in records.values())
            for name in ("bytes", "rows", "tokens", "near_ties")
        }
        assert total["tokens"] == sum(shard.num_tokens for shard in plan)
        show(Shard.open(stage.directory / plan[0].name), stage.verifier, total)
        log("bytes a token", stored=total["bytes"] // total["tokens"], plain=plain_bytes(config))
        stage.commit(
            files=[*records],
            checksums={name: record["sha256"] for name, record in records.items()},
            counts={
                "in": rows.num_rows,
                "out": total["rows"],
                "dropped": {"not_on_disk_now": rows.num_rows - total["rows"]} if in_rounds else {},
                "tokens": total["tokens"],
                "next_token_near_ties": total["near_ties"],
            },
            wiring=wiring,
            results=results,
        )


def say_missing(invocation: Invocation, num_own: int, records: dict) -> None:
    """This worker is done, others are not: what is missing, and who completes it."""
    missing = [name for name, record in records.items() if not record]
    log("this worker's part is done", worker=invocation.worker, shards=num_own)
    log("shards of other workers are missing", missing=f"{len(missing)}/{len(records)}")
    command = invocation.command(invocation.script)
    log("the last worker publishes; when none is left at work, this completes it", command=command)


def show(shard: Shard, verifier, total: dict[str, int]) -> None:
    """What an operator should look at: one row's states, and how the proof went."""
    row = shard.row(0)
    log("sample", row=row.row_id, text=verifier.tokenizer.decode(row.input_ids[-24:]))
    rms = row.aux_hidden_states.float().square().mean((0, 2)).sqrt()
    log("aux states", shape=tuple(row.aux_hidden_states.shape), rms=[f"{v:.3g}" for v in rms])
    log("last state", rms=float(row.last_hidden_states[-1].float().square().mean().sqrt()))
    shown = {name: total[name] for name in ("rows", "near_ties")}
    log("the verifier's next token equals the head's argmax", **shown)


if __name__ == "__main__":
    run_script(main, __doc__, takes_workers=True)
