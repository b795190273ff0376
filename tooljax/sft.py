"""Cold start: next-token loss on demonstrations, assistant tokens only. `python -m tooljax.sft --config configs/x.gin`.

Demonstrations become token streams through the same conversation code as rollouts, so the policy learns on exactly the
tokens it will later see; the update is the one of `tooljax.train` with another loss.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_sidecar.conversation import demonstration
from rollout_sidecar.formats import choose_format, get_format
from rollout_sidecar.tokenizer import ChatTokenizer
from tooljax.batch import PackItem, packed
from tooljax.config import Config, parse_args
from tooljax.data.demonstrations import Demonstration, DemonstrationSource, read_demonstrations
from tooljax.policy import load_policy, make_updater
from tooljax.progress import Progress


def cold_start(config: Config) -> Path:
    """Trains on config.sft.demonstrations and returns the Hugging Face folder it wrote."""
    output = Path(config.sft.output or Path(config.run.dir) / "sft")
    policy = load_policy(config)
    tokenizer = ChatTokenizer.from_folder(config.model.path)
    name = config.sidecar.tool_format
    tool_format = choose_format(tokenizer) if name == "auto" else get_format(name)
    source = DemonstrationSource(
        read_demonstrations(config.sft.demonstrations),
        per_step=config.sft.conversations_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )

    def item(example: Demonstration) -> PackItem:
        conversation = demonstration(tokenizer, tool_format, example.messages, example.tools)
        return PackItem(conversation.token_ids, conversation.loss_mask, advantage=1.0)

    updater = make_updater(
        config, policy, total_updates=config.sft.steps, learning_rate=config.sft.learning_rate
    )
    state = updater.init(policy.trained)
    with Progress(config.run.progress, config.sft.steps, title="cold start") as progress:
        for step in range(1, config.sft.steps + 1):
            with progress.phase("batch"):
                batch = packed(
                    [item(example) for example in source.next()],
                    row_lengths=config.batch.row_lengths,
                    rows_per_microbatch=config.batch.rows_per_microbatch,
                    mixed_lengths=config.batch.mixed_lengths,
                    shards=policy.layout.ways("batch"),
                )
            with progress.phase("update"):
                state, metrics = updater.update(state, batch, loss="sft")
            progress.step(step, metrics)
    policy.save(updater.compute_params(state), output)
    if policy.adapters:
        policy.save_adapter(state.params, output / "adapter")
    return output


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 when the folder was written, 1 with one sentence when not."""
    config = parse_args(argv, prog="tooljax.sft", description=__doc__ or "")
    try:
        output = cold_start(config)
    except (ValueError, OSError) as error:
        print(f"tooljax.sft: {error}", file=sys.stderr)
        return 1
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
