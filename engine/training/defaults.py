"""Has the defaults of training heads. Help shows them, so this module loads no torch."""

EAGLE_VOCABULARY = 32_768  # the number of tokens that a new EAGLE head drafts at most
EAGLE_RATE = 0.6  # the largest learning rates, by the target's hidden size
MTP_RATE = 0.3
