"""How messages say numbers."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """"1 rank", "2 ranks". ``plural``: where it is not the noun and an s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"
