"""The process in which answers are compared by math-verify: JSON lines in, JSON lines out. Run by path, not imported.

Comparing may take for ever ("9^{9^{9^{9}}}"), and math-verify's own deadlines are signals, which work in a main thread
only. Here a timer of the kernel ends the process, whatever it computes; math_answer.py starts another one.
"""

import json
import logging
import resource
import signal
import sys

MEMORY_BYTES = 2 * 2**30


def main() -> None:
    """Answers {"gold", "answer", "timeout_s"} with {"equal": bool} or {"error": text}, until its input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = sys.stdout
    sys.stdout = sys.stderr  # nothing that a library prints may pass for a reply
    try:
        import math_verify
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        return
    logging.disable(logging.CRITICAL)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            reply = _compare(math_verify, request["gold"], request["answer"])
        except Exception as error:  # a MemoryError among them
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


def _compare(math_verify, gold: str, answer: str) -> dict[str, object]:
    config = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]

    def parse(text: str) -> list:
        # In a box, math-verify takes all of it, words too.
        return math_verify.parse(
            f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None
        )

    truth = parse(gold)
    if not truth:
        return {"error": f"the ground truth {gold!r} is no mathematical expression"}
    return {"equal": bool(math_verify.verify(truth, parse(answer), timeout_seconds=None))}


if __name__ == "__main__":
    main()
