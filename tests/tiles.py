"""How many blocks of rows the kernels cut an expert's tokens into."""


def num_blocks(plan, num_rows: int) -> int:
    """The last of several takes up to `extra_tokens` along."""
    if num_rows <= plan.block_tokens:
        return int(num_rows > 0)
    return -(-(num_rows - plan.extra_tokens) // plan.block_tokens)
