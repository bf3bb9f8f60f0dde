"""Runs the training program with a tokenizer that is slow, in every process that tokenizes; counts its calls.

``python -m tests.training.data.slow_program SECONDS CALLS --config FILE``: each call of the tokenizer takes ``SECONDS``
more, and adds a line to the file ``CALLS``: the process that made it, and the number of texts.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary

# At the top of the module: the process in the background imports it too, and gets these arguments.
SECONDS, CALLS = float(sys.argv[1]), Path(sys.argv[2])
encode = Vocabulary.encode


def slow_encode(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    time.sleep(SECONDS if len(texts) > 1 else 0)  # the sample of the fingerprint is one text
    with CALLS.open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {len(texts)}\n")
    return encode(vocabulary, texts)


Vocabulary.encode = slow_encode

if __name__ == "__main__":
    from nxd_memopt.training.__main__ import main

    sys.exit(main(sys.argv[3:]))
