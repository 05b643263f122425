"""Hostlists with the names that Slurm 22.05.8 gives for them, and names with what it writes."""

EXPANDED = [
    ("n1", "n1"),
    ("n[1-3]", "n1 n2 n3"),
    ("n[3,1-2]", "n3 n1 n2"),
    (",n1,,n2,", "n1 n2"),
    ("n1 n2\tn3", "n1 n2 n3"),
    ("n[001-003]", "n001 n002 n003"),
    ("n[01-3]", "n01 n02 n03"),
    ("n[9-011]", "n9 n10 n11"),
    ("n[08-12]", "n08 n09 n10 n11 n12"),
    ("n[1-1]", "n1"),
    ("n01,n1", "n01 n1"),
    ("[1-2]", "1 2"),
    ("n,[1-2]", "n 1 2"),
    ("rack[0-1]node[1-2]", "rack0node1 rack0node2 rack1node1 rack1node2"),
    ("n[1-2]-[3-4]", "n1-3 n1-4 n2-3 n2-4"),
    ("n[1-2][3-4]", "n13 n14 n23 n24"),
    ("n[1-2][3-4][5-6]", "n135 n136 n235 n236 n145 n146 n245 n246"),
    (
        "a[1-2]b[3-4]c[5-6]d[7-8]",
        "a1b3c5d7 a1b3c5d8 a2b3c5d7 a2b3c5d8 a1b4c5d7 a1b4c5d8 a2b4c5d7 a2b4c5d8 "
        "a1b3c6d7 a1b3c6d8 a2b3c6d7 a2b3c6d8 a1b4c6d7 a1b4c6d8 a2b4c6d7 a2b4c6d8",
    ),
    ("login,gpu[1-2]", "login gpu1 gpu2"),
    ("", ""),
]

WRITTEN = [
    ("n1 n2 n3 n10", "n[1-3,10]"),
    ("n01 n02 n1 n3", "n[01-02,1,3]"),
    ("n3 n2 n1", "n[3,2,1]"),
    ("a1 b1 b2 a2", "a1,b[1-2],a2"),
    ("n9 n10 n11", "n[9-11]"),
    ("n09 n10 n11", "n[09-11]"),
    ("a1b2 a1b3 a2b2", "a1b[2-3],a2b2"),
    ("login", "login"),
    ("n1x n2x", "n1x,n2x"),
    ("n001 n002 n3", "n[001-002,3]"),
    ("n1", "n1"),
]
