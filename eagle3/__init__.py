"""End-to-end EAGLE-3 drafter training for any verifier vLLM serves.

Modules, lowest floor first; imports point down only:

ground   errors, files, disk, machine, config, config_file, workers, locks, script, progress,
         verifier, contract, fingerprint, manifest, artifact, run_state, leftovers, ranks, stage
floor 1  rows, eight_bit, shard_layout, shards, shard_plan, messages, chat, corpus, vocab, drafter,
         acceptance, summary
floor 2  engine, vllm_cpu, worker, capture, batches, ttt, replay, predict, answers, selection,
         checkpoints, retention
floor 3  loop, export, exported, serve, report, pictures
top      the six scripts, status, rounds
"""
