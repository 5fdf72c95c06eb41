"""Writes digits.txt from scikit-learn's copy of the handwritten digits.

Run once, in an environment of its own, since nothing else here needs scikit-learn:

    python3 -m venv /tmp/digits && /tmp/digits/bin/pip install scikit-learn
    /tmp/digits/bin/python export_digits.py
"""

from pathlib import Path

from sklearn.datasets import load_digits

# A pixel is 0 (white) to 16 (black), and takes one character.
PIXELS = "0123456789abcdefg"


def main() -> None:
    digits = load_digits()
    lines = (
        f"{digit} {''.join(PIXELS[int(pixel)] for pixel in image)}\n"
        for digit, image in zip(digits.target, digits.data, strict=True)
    )
    (Path(__file__).parent / "digits.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
