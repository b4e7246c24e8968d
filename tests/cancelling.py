"""A layer whose gate and up are rounding errors, as halves of hidden cancel: bits tell how sums
were cut. In two parts the sums of the halves are exactly opposite, and y is zero.
"""

HIDDEN = 2048  # two parts, as decode cuts few tiles


def cancel(codes_of_rows, scales_of_rows, signs=0x80):
    """Weights in e4m3, or in e2m1 with signs=0x88: the second half of hidden becomes the first with
    the other sign.
    """
    half, blocks = codes_of_rows.shape[-1] // 2, scales_of_rows.shape[-1] // 2
    codes_of_rows[..., half:] = codes_of_rows[..., :half] ^ signs
    scales_of_rows[..., blocks:] = scales_of_rows[..., :blocks]


def repeat(codes, scales):
    """Tokens: the second half of hidden becomes the first."""
    half, blocks = codes.shape[-1] // 2, scales.shape[-1] // 2
    codes[..., half:] = codes[..., :half]
    scales[..., blocks:] = scales[..., :blocks]
