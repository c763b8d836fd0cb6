"""How documents set out their facts: layouts, by their names.

A layout is written as parts, separated by slashes:

    title             one of the set pieces of the type (a heading, a greeting, a closing ...)
    colon:0123        groups of fields, in this order, as lines in the style named
    prose:23          groups of fields as sentences
    text              filler

A layout belongs to one side of the fence: a held-out document is arranged in a new way.
"""

from __future__ import annotations

from demo_corpus.sample import Split

Layouts = dict[Split, dict[str, str]]  # for each side, names and parts

FORM_LAYOUTS: Layouts = {
    Split.TRAIN: {
        "colon-a": "title / colon:0123 / text",
        "colon-b": "text / colon:3120 / text",
        "dash-a": "title / dash:1023 / text",
        "dash-b": "dash:2301 / text",
        "brackets-a": "title / text / brackets:0213",
        "upper-a": "upper:0132 / text",
        "upper-b": "title / text / upper:2013",
        "pipes-a": "title / pipes:0123 / text",
        "pipes-b": "text / pipes:1302 / text",
        "bullets-a": "title / text / bullets:1203 / text",
        "bullets-b": "bullets:3012 / text",
        "stars-a": "title / stars:0321 / text",
        "semicolons-a": "title / semicolons:0123 / text",
        "semicolons-b": "text / semicolons:2130",
        "equals-a": "title / equals:1320 / text",
        "stack-a": "title / stack:0312 / text",
        "numbered-a": "title / text / numbered:0231",
        "parentheses-a": "title / parentheses:1230 / text",
        "columns-a": "title / columns:01 / columns:23 / text",
        "columns-b": "title / columns:10 / text / colon:32",
        "prose-a": "title / prose:0123 / text",
        "prose-b": "text / prose:1023 / text",
        "prose-c": "prose:3120 / text",
        "prose-d": "title / prose:02 / text / prose:13",
        "two-part-a": "title / colon:01 / prose:23 / text",
        "two-part-b": "title / prose:10 / text / bullets:32",
        "two-part-c": "pipes:02 / text / prose:31",
        "two-part-d": "title / prose:20 / text / upper:13",
        "three-part-a": "title / dash:0 / prose:12 / text / colon:3",
        "three-part-b": "title / semicolons:1 / text / prose:30 / stars:2",
    },
    Split.HELD_OUT: {
        "prose-held": "title / text / prose:2031 / text",
        "bullets-prose-held": "title / bullets:20 / text / prose:13",
        "pipes-dash-held": "title / text / pipes:31 / text / dash:20",
        "semicolons-brackets-held": "semicolons:03 / text / brackets:12",
    },
}

LETTER_LAYOUTS: Layouts = {
    Split.TRAIN: {
        "classic-a": "dateline / dear / prose:2 / text / prose:3 / bye",
        "classic-b": "names / dateline / dear / text / prose:23 / bye",
        "classic-c": "sender line / dateline / subject line / dear / text / prose:3 / bye",
        "classic-d": "dear / prose:12 / text / prose:3 / bye",
        "classic-e": "dear / text / prose:2 / prose:3 / bye / dateline",
        "colon-a": "colon:0123 / dear / text / bye",
        "colon-b": "colon:21 / dear / text / prose:3 / bye",
        "colon-c": "dateline / colon:02 / dear / text / prose:3 / bye",
        "dash-a": "dash:1023 / text / bye",
        "dash-b": "dear / text / bye / dash:123",
        "brackets-a": "brackets:0213 / dear / text / bye",
        "upper-a": "upper:102 / dear / prose:3 / text / bye",
        "pipes-a": "pipes:0123 / dear / text / bye",
        "pipes-b": "pipes:13 / dear / prose:2 / text / bye",
        "bullets-a": "bullets:012 / dear / text / prose:3 / bye",
        "stars-a": "dear / text / stars:132 / bye",
        "semicolons-a": "semicolons:0123 / dear / text / bye",
        "semicolons-b": "dateline / dear / text / bye / semicolons:23",
        "equals-a": "equals:3012 / text / bye",
        "stack-a": "stack:012 / dear / text / prose:3 / bye",
        "numbered-a": "names / text / numbered:123",
        "parentheses-a": "parentheses:012 / dear / text / prose:3 / bye",
        "columns-a": "columns:01 / columns:23 / dear / text / bye",
        "prose-a": "prose:0123 / text / bye",
        "prose-b": "dear / prose:021 / text / prose:3",
        "prose-c": "text / prose:10 / text / prose:23",
    },
    Split.HELD_OUT: {
        "prose-held": "names / prose:3 / text / prose:21 / bye",
        "bullets-held": "dateline / dear / prose:3 / text / bye / bullets:2",
        "pipes-held": "names / pipes:21 / text / prose:3",
        "colon-held": "dear / text / colon:312 / bye",
    },
}
