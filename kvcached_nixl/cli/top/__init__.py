# SPDX-License-Identifier: Apache-2.0
"""``kvcached-nixl top``: engines, routers, hand-overs and memory in a terminal, from ``/metrics`` over HTTP alone.

    options      the command line
    target       a URL, and the name that a server has on the screen
    scrape       HTTP: bounded in time and size
    look         what one answer of ``/metrics`` said, and what changed between two answers
    columns      which metric is which column: a table each for engines and for routers
    cells        the figure of a column, as text and as a number
    fleet        the servers: those that were given, and those that a router names
    attention    what an operator should look at, in words
    screen       lines of text from all of it
    keys         the keyboard, and the state of the terminal
    command      runs it: once, as JSON, or live

Whatever a server says is data: it is shown as printable ASCII, and never interpreted.
"""
