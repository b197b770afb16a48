"""Fill text templates from a row: `{column}` stands for a column of the data."""

import re
import string
from collections.abc import Callable

from common.config.extra import extra
from common.parallel import distributed


def columns_of(flag: str, template: str) -> set[str]:
    """Return the names in braces in a template. Raises `ValueError` if braces do not match."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
    return {re.split(r"[.\[]", field)[0] for field in fields if field is not None}


def template_filler(flag: str, template: str) -> Callable[[dict], str]:
    """Return a function that fills the template with the values of a row. For rows of multiple
    choice, `{lettered_options}` and `{right_letter}` may be used like columns. Raises `ValueError`
    if braces do not match or are empty."""
    fields = columns_of(flag, template)
    if "" in fields:
        raise ValueError(f"{flag}: {{}} names no column")
    has_options = bool(fields & {"lettered_options", "right_letter"})
    if has_options:
        with extra("graders", f"{flag} with lettered options"):
            from extras.graders.choice import option_columns

    def fill(row: dict) -> str:
        columns = row | option_columns(row) if has_options else row
        values = {column: value for column, value in columns.items() if value is not None}
        try:
            return template.format_map(values)
        except Exception as error:  # a column is missing, or has another type
            problem = distributed.first_line(error)
            if isinstance(error, KeyError):
                problem = f"no column {error.args[0]}"
            raise ValueError(f"{row['_source']}: {flag}: {problem}") from error

    return fill
