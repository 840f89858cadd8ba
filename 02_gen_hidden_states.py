"""Capture the verifier's hidden states over 01's token rows, with a patched vLLM worker.

reads   01_data/rows.safetensors      token rows, training and validation
writes  02_hidden/shard-00000.safetensors, ...
            aux_hidden_states   verifier dtype [num_tokens, num_aux, hidden]
            last_hidden_states  verifier dtype [num_tokens, hidden]
            input_ids, row_ids, row_offsets

run     python 02_gen_hidden_states.py configs/smollm2_cpu.yaml
        python 02_gen_hidden_states.py CONFIG --worker 0/4   (to 3/4, together, on one shared disk)
time    the verifier's prefill rate: the demo's 120K tokens in about a minute
disk    (aux layers + 1) x hidden x 2 bytes a token: 4.6 KB in the demo, 57 KB for Kimi-K2.5

If it stops, run the same command again: published shards are kept, at most two are computed twice.
Worker i of n computes the shards whose number leaves i over n; whichever finds all of them proven
publishes the manifest, and so does a run without --worker, whoever made the shards.
"""

from pathlib import Path

from eagle3.capture import VerifierHead, compute_shard, finish_shard, plan_shards, read_records
from eagle3.contract import Wiring
from eagle3.disk import require_free, require_room
from eagle3.engine import Engine
from eagle3.preflight import check
from eagle3.progress import Progress
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script, stop_flag
from eagle3.shards import Shard, bytes_per_token, shard_bytes
from eagle3.stage import Stage


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    if invocation.check:
        return check(config, "02_hidden", invocation)
    with Stage(config, "02_hidden", invocation) as stage:
        if stage.done:
            return
        rows = TokenRows.load(stage.inputs["01_data"].path("rows.safetensors"))
        wiring = Wiring.at_capture(config, stage.verifier)
        num_aux = len(wiring.aux_layer_ids)
        token_bytes = bytes_per_token(num_aux, wiring.hidden_size, wiring.dtype)
        shard_tokens = config.capture.shard_bytes // token_bytes
        plan = plan_shards(rows.lengths, shard_tokens, stage.directory)
        planned_bytes = {
            path: shard_bytes(len(part), int(rows.lengths[part].sum()), token_bytes)
            for path, part in plan.items()
        }
        records = read_records(plan)
        require_room(
            stage.directory,
            needed_bytes=sum(planned_bytes.values()),
            kept_bytes=sum(record["bytes"] for record in records.values() if record),
            budget_bytes=config.capture.disk_budget_bytes,
        )
        worker = invocation.worker
        own = worker.part(list(plan)) if worker else list(plan)
        missing = [path for path in own if not records[path]]
        if missing:
            for path in missing:  # what a killed run wrote and could not prove
                path.unlink(missing_ok=True)
            own_tokens = sum(int(rows.lengths[plan[path]].sum()) for path in own)
            done_tokens = sum(records[path]["tokens"] for path in own if records[path])
            progress = Progress(own_tokens, "tokens", done=done_tokens)
            head = VerifierHead(stage.verifier, config.verifier.dtype)
            engine = Engine(config, stage.verifier)
            pending = None
            for path in [*missing, None]:  # a shard is written while the next one is computed
                computed = None
                if path is not None:
                    require_free(stage.directory, planned_bytes[path])
                    tokens = [rows.row(i)[0].tolist() for i in plan[path]]
                    computed = compute_shard(engine, wiring, plan[path], tokens, path)
                if pending is not None:
                    records[pending.path] = finish_shard(engine, head, pending)
                    progress.advance(records[pending.path]["tokens"], shard=pending.path.name)
                pending = computed
                if stop_flag.signal_name and pending is not None:
                    finish_shard(engine, head, pending)
                stop_flag.raise_if_set()
            progress.close()
            log("captured", rate=f"{progress.rate:.0f} tokens/s")

        if worker is not None:
            records = read_records(plan)
            if not all(records.values()):
                return say_missing(invocation, len(own), records)
        check_identities(rows, plan, records)
        near_ties = sum(record["near_ties"] for record in records.values())
        show(Shard.open(next(iter(plan))), stage.verifier, near_ties, rows.num_rows)
        stage.commit(
            files=[path.name for path in plan],
            checksums={path.name: record["sha256"] for path, record in records.items()},
            counts={
                "in": rows.num_rows,
                "out": sum(record["rows"] for record in records.values()),
                "dropped": {},
                "tokens": sum(record["tokens"] for record in records.values()),
                "next_token_near_ties": near_ties,
            },
            wiring=wiring,
        )


def check_identities(rows: TokenRows, plan: dict[Path, list[int]], records: dict) -> None:
    """Every row is in exactly one shard, and the tokens add up."""
    assert sorted(i for part in plan.values() for i in part) == list(range(rows.num_rows))
    assert sum(record["tokens"] for record in records.values()) == int(rows.lengths.sum())


def say_missing(invocation: Invocation, num_own: int, records: dict) -> None:
    """This worker is done, others are not: what is missing, and who completes it."""
    missing = [path.name for path, record in records.items() if not record]
    log("this worker's part is done", worker=invocation.worker, shards=num_own)
    log("shards of other workers are missing", missing=f"{len(missing)}/{len(records)}")
    command = invocation.command(invocation.script)
    log("the last worker publishes; when none is left at work, this completes it", command=command)


def show(shard: Shard, verifier, near_ties: int, num_rows: int) -> None:
    """What an operator should look at: one row's states, and how the proof went."""
    row = shard.row(0)
    log("sample", row=row.row_id, text=verifier.tokenizer.decode(row.input_ids[-24:]))
    rms = row.aux_hidden_states.float().square().mean((0, 2)).sqrt()
    log("aux states", shape=tuple(row.aux_hidden_states.shape), rms=[f"{v:.3g}" for v in rms])
    log("last state", rms=float(row.last_hidden_states.float().square().mean().sqrt()))
    log("the verifier's next token equals the head's argmax", rows=num_rows, near_ties=near_ties)


if __name__ == "__main__":
    run_script(main, __doc__, takes_workers=True)
