"""All rows of the oracle, and what is not compared."""

from __future__ import annotations

import oracle_rows
import rows_by_name

ROWS = [*oracle_rows.ROWS, *rows_by_name.ROWS]
NOT_RUN = {**oracle_rows.NOT_RUN, **rows_by_name.NOT_RUN}
