"""Where a run stands, and the exact next command.

    python -m eagle3.status configs/smollm2_cpu.yaml
    python -m eagle3.status configs/smollm2_cpu.yaml --verify-checksums   (reads every file)

Reads the run's directory and nothing else: it may be asked at any time, while stages run and after
they died, and changes nothing. States: not started, running, partial, done, stale (the config, an
input or the verifier is not what it was made from), damaged, failed, unknown (the verifier or the
config's sources cannot be read). With --verify-checksums a file that is not what was published is
named, and the exit code is 3.
"""

from __future__ import annotations

import os
from functools import partial

from .artifact import Artifact
from .config import Config
from .disk import free_bytes, used_bytes
from .errors import StaleInputError
from .files import format_bytes
from .fingerprint import STAGES
from .manifest import MANIFEST, read_manifest
from .run_state import STATUS, StageState, look, next_step
from .script import Invocation, command_line, exit_after, log, stop_flag


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # a verifier named by its hub name is looked up here only
    parser = command_line(__doc__)
    parser.add_argument(
        "--verify-checksums", action="store_true", help="read every published file as well"
    )
    args = parser.parse_args()
    invocation = Invocation(STATUS, args.config, tuple(args.set), check=False, redo=False)
    log.stage = "status"
    exit_after(partial(show, verify_checksums=args.verify_checksums), invocation)


def show(invocation: Invocation, *, verify_checksums: bool) -> None:
    """Print the table and the next command.

    Raises:
        StaleInputError: ``verify_checksums`` found a file whose content changed.
    """
    config = invocation.load_config()
    states = look(config, invocation)
    print(f"{config.run_dir}, {format_bytes(free_bytes(config.run_dir))} free")
    for state in states.values():
        print_row(config, state)
    if verify_checksums:
        check_all(config, invocation)
    what, values = next_step(config, states, invocation)
    print(f"{what}: {next(iter(values.values()))}")


def print_row(config: Config, state: StageState) -> None:
    size = used_bytes(config.run_dir / state.name)
    lines = list(state.why)
    if kept := used_bytes(config.run_dir / f"{state.name}.old"):
        lines.append(f"{format_bytes(kept)} from before --redo, kept until the new is published")
    start = f"{state.name:<11}{state.state:<12}{format_bytes(size) if size else '-':>10}   "
    print((start + f"\n{'':36}".join(lines)).rstrip())


def check_all(config: Config, invocation: Invocation) -> None:
    """Read every published file and compare it with its manifest.

    Raises:
        StaleInputError: naming the first that differs, after all of them were shown.
    """
    changed, num_files = [], 0
    for name, spec in STAGES.items():
        directory = config.run_dir / name
        if not (directory / MANIFEST).is_file():
            continue
        artifact = Artifact(directory, read_manifest(directory, spec, invocation))
        for file_name, expected, found in artifact.checksums():
            stop_flag.raise_if_set()
            num_files += 1
            if found != expected:
                changed.append((name, directory / file_name))
                print(f"not as published: {directory / file_name}")
    print(f"checksums: {num_files - len(changed)} of {num_files} files are as published")
    if changed:
        name, path = changed[0]
        raise StaleInputError(
            "published files changed after they were checked",
            where=path,
            expected="the content that its manifest has the checksum of",
            found=f"another content, or none; of {len(changed)} of {num_files} files in all",
            fix="remove them: their stages make them again and keep the rest",
            command=invocation.command(STAGES[name].script),
        )


if __name__ == "__main__":
    main()
