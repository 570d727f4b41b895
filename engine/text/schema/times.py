"""Has formats of dates and times as exact patterns: months have their days, and February has 29 in leap
years.

RFC 3339 is narrowed to what Python and JavaScript read as well: there is no year 0, a second has no number 60
(which RFC 3339 allows at the end of a few days only), and a fraction has nine digits at most.
"""

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{LEAP_YEAR}-02-29)"
)
HOUR = "(?:[01][0-9]|2[0-3])"
TIME = rf"{HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+-]{HOUR}:[0-5][0-9])"
COUNT = "[0-9]{1,9}"
OF_DAY = f"T(?:{COUNT}H(?:{COUNT}M(?:{COUNT}S)?)?|{COUNT}M(?:{COUNT}S)?|{COUNT}S)"
OF_DAYS = f"(?:{COUNT}Y(?:{COUNT}M(?:{COUNT}D)?)?|{COUNT}M(?:{COUNT}D)?|{COUNT}D)"
DURATION = f"P(?:{COUNT}W|{OF_DAY}|{OF_DAYS}(?:{OF_DAY})?)"

# Each format has a pattern of the whole string.
PATTERNS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": DATE,
        "time": TIME,
        "date-time": f"{DATE}[tT]{TIME}",
        "duration": DURATION,
    }.items()
}
