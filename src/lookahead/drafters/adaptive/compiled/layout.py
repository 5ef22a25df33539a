"""Where compiled code finds what it works on: places in headers of int64, most of them addresses."""

# Header of a trie; its slots are pairs of key and node.
T_NODES, T_USED, T_SLOTS, T_MASK, T_ORDER, T_GENERATION, TRIE = range(7)
# Header of a reader, then its active contexts.
R_TRIE, R_MARK, R_GENERATION, R_ACTIVE, R_FIRST = range(5)
# Header of a table of the logit cache. Entries stand in a ring, in the order in which their keys came, and have
# numbers that go on rising; slots are pairs of key and number. A record: count and origin, ids, values.
L_RECORDS, L_KEYS, L_SLOTS, L_MASK, L_RING, L_OLDEST, L_NEXT, L_WIDTH, L_MOST, TABLE = range(10)
# Header of the window's n-grams; a slot is a key and its continuations, -1 for none.
N_SLOTS, N_MASK, N_USED, NGRAMS = range(4)
# Header of a grower. Addresses of tables, of what has been learned, and of the sources,
G_TABLES, G_BUCKETS, G_HITS, G_TRIALS, G_PRIORS, G_ESTIMATE, G_LEVELS = range(7)
G_SUFFIX_AT, G_CORPUS_AT, G_JOINT_AT, G_READER, G_CORPUS, G_NGRAMS, G_ANSWERS = range(7, 14)
G_NOISE, G_NOISE_SIZE, G_SAMPLED, G_USE_LOGITS, G_USE_JACOBI, G_SIZE = range(14, 20)
# of the text's end and of the tree,
G_TAIL, G_ROWS, G_DEPTH, G_STOP, G_COUNT, G_HEAP = 20, 23, 24, 25, 26, 27
G_TOKENS, G_PARENTS, G_DEPTHS, G_PAIRS, G_PROBABILITIES, G_PLACES, G_RECALLS = range(28, 35)
G_STRIDE, G_META, G_PROPOSED, G_CELLS, G_KINDS, G_EDGES, G_EDGE_TOKENS, G_EDGE_COUNTS = range(35, 43)
G_HEAP_KEYS, G_HEAP_NUMBERS, G_FLOATS, G_SAID = range(43, 47)
# and of a step that was made.
G_PATH, G_TRUTHS, G_LENGTH, G_COLUMNS, G_WINDOW, G_IDS, G_ODDS, G_FOUND, G_CREDIT, G_CREDITED = range(47, 57)
# Scratch: where the records of a step's rows begin.
G_RECORDS, GROWER = 57, 58
# Floats of a grower.
F_TEMPERATURE, F_FLOOR, F_LAST, FLOATS = range(4)
# What is known of a node's proposals; S and G have three tokens and three buckets each.
M_ASKED, M_COUNT, M_ORDER, M_KINDS, M_MATCHED, M_RECALLED = range(6)
M_MATCH, M_RECALL, META = 6, 12, 18
# Places in the credit by source.
C_SUFFIX, C_LOGITS, C_NGRAMS, C_JACOBI, C_CORPUS, C_WINDOW, CREDITS = range(7)
#: Depths that answers and noise are kept for.
DEEPEST = 1200
#: Proposals of a node beside those of the logit cache: three each of S, G, J and P.
BESIDE = 12
#: In place of a key. Slots hold keys plus one, so that fresh memory, which is zero, has none.
EMPTY = 0
DONE, SHORT = -1, -2
FAR = 1 << 50
