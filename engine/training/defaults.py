"""What the training of heads does unless it is told otherwise. Help shows it, so it loads no torch."""

EAGLE_VOCABULARY = 32_768  # tokens that a new EAGLE head drafts at most
EAGLE_RATE = 0.6  # largest learning rates, by the target's hidden size
MTP_RATE = 0.3
