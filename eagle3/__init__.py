"""End-to-end EAGLE-3 drafter training for any verifier vLLM serves.

Modules, lowest floor first; imports point down only:

ground   errors, files, config, script, verifier, contract, stage
floor 1  rows, shards, chat, corpus, vocab, drafter, acceptance
floor 2  engine, worker, batches, ttt, replay
floor 3  loop, export, serve, report
"""
