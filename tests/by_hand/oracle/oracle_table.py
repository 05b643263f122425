"""All rows of the oracle, and what is not compared."""

from __future__ import annotations

import oracle_rows
import rows_by_name
import rows_of_preferences

ROWS = [*oracle_rows.ROWS, *rows_by_name.ROWS, *rows_of_preferences.ROWS]
NOT_RUN = {**oracle_rows.NOT_RUN, **rows_by_name.NOT_RUN, **rows_of_preferences.NOT_RUN}
