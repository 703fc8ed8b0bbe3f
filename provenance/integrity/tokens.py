"""Tokens whose makers give them a form of their own: a beginning, and so many letters and digits drawn behind it.

Texts have few long runs of letters and digits with a digit among them. Only around these is a token looked for, so that
a long list of forms costs a text of words next to nothing.
"""

import functools
import re
from collections.abc import Iterator

RUN = 20  # every form below has as many letters, digits, dashes and underscores in a row
BACK = 96  # what of a form may stand before its run: the host and path of a hook
PLAIN = bytes(97 if chr(n).isalnum() or chr(n) in "-_" else 32 for n in range(128)) + b" " * 128
DIGIT = re.compile(rb"\d")
REST = re.compile(rb"[\w.=+/:@%~-]*+")
MIXED = rb"(?=[a-z0-9]{0,40}[A-Z])(?=[A-Z0-9]{0,40}[a-z])(?=[A-Za-z]{0,40}\d)"
DRAWN = rb"(?=[A-Za-z_.-]{0,60}\d)[\w-]{20,}+[\w.=-]*+"  # with dashes and underscores among them
HEX = rb"[0-9a-f]"
# How a token begins, and what follows. It stands behind a sign, or behind an escape of JSON, which ends in a letter.
FORMS: tuple[tuple[tuple[bytes, ...], bytes], ...] = (
    ((b"sk-ant-", b"sk-proj-", b"sk-svcacct-", b"sk-admin-", b"sk-or-v1-", b"xoxb-", b"xoxp-", b"xoxa-", b"xoxs-",
      b"xoxr-", b"xoxe-", b"xoxc-", b"xoxd-", b"xoxe.xox", b"glpat-", b"gldt-", b"glrt-", b"glptt-", b"glcbt-",
      b"glft-", b"glimt-", b"glsoat-", b"glagent-", b"gloas-", b"tskey-", b"hvs.", b"hvb.", b"hvr.", b"nvapi-",
      b"tvly-", b"pypi-", b"GOCSPX-", b"ya29.", b"figd_", b"dckr_pat_", b"dckr_oat_", b"wandb_v1_", b"pcsk_",
      b"tgp_v1_", b"ATATT3", b"ATCTT3"), DRAWN),
    ((b"AIza",), rb"[\w-]{35}"),
    ((b"dp.st.", b"dp.pt.", b"dp.ct.", b"dp.sa.", b"dp.scim.", b"dp.audit."), rb"(?:[\w-]{2,35}\.)?[A-Za-z0-9]{40,}+"),
    ((b"dapi",), HEX + rb"{32}(?![A-Za-z0-9])(?:-\d{1,2})?"),
    ((b"SK", b"AC"), HEX + rb"{32}(?![A-Za-z0-9_])"),
    ((b"key-",), HEX + rb"{32}(?![\w-])"),
    ((b"SG.",), rb"[\w-]{22}\.[\w-]{43}"),
    ((b"sntrys_", b"sntryu_"), rb"[A-Za-z0-9+/=_-]{40,}+"),
    ((b"glc_",), MIXED + rb"[A-Za-z0-9+/=]{32,}+"),
    ((b"glsa_",), rb"[A-Za-z0-9]{32}_[A-Za-z0-9]{8}"),
    ((b"PMAK-",), HEX + rb"{24}-" + HEX + rb"{34}"),
    ((b"lsv2_pt_", b"lsv2_sk_"), HEX + rb"{32}_" + HEX + rb"{10}"),
    ((b"ntn_", b"jina_"), MIXED + rb"[A-Za-z0-9]{40,}+"),
    ((b"secret_",), MIXED + rb"[A-Za-z0-9]{43}(?!\w)"),
    ((b"rpa_",), rb"(?=[A-Z]{0,40}\d)[A-Z0-9]{30,}+[A-Za-z0-9]*+"),
    ((b"fw_",), MIXED + rb"[A-Za-z0-9]{22,40}+(?!\w)"),
    ((b"ak-", b"as-"), MIXED + rb"[A-Za-z0-9]{22}(?![\w-])"),
    ((b"pat",), rb"[A-Za-z0-9]{14}\." + HEX + rb"{64}"),
    ((b"v1.0-",), rb"[A-Za-z0-9]{24}-[A-Za-z0-9]{100,}+"),
)  # fmt: skip
# In these the address stays, and what stands for its owner goes.
HOOK = rb"[\w/@.+=%-]{20,}+"
HOOKS = {
    b"hooks.slack.com/": rb"(?:services|workflows|triggers)/)" + HOOK,
    b"discord.com/api/": rb"(?:v\d{1,2}/)?webhooks/)" + HOOK,
    b"discordapp.com/api/": rb"(?:v\d{1,2}/)?webhooks/)" + HOOK,
    b"outlook.office.com/webhook/": rb")" + HOOK, b"outlook.office365.com/webhook/": rb")" + HOOK,
    b".webhook.office.com/webhookb2/": rb")" + HOOK,
    b":A": rb"(?<=\d{8}:A))[\w-]{34}(?![\w-])",  # of Telegram: the number of a bot before it
}  # fmt: skip
BODY = {start: body for starts, body in FORMS for start in starts}
MARKS = (*BODY, *HOOKS)
MANY = 64  # runs after which it pays to see which marks the text holds at all


@functools.cache
def _form(mark: bytes) -> re.Pattern[bytes]:
    """Return the whole form of a token by its mark. That stands first: a search for it is quick."""
    start = re.escape(mark)
    if mark in HOOKS:
        return re.compile(rb"(?P<kept>" + start + HOOKS[mark])
    edge = rb"(?:(?<![A-Za-z0-9_]" + start + rb")|(?<=\\[nrtbf]" + start + rb"))"
    return re.compile(rb"(?P<kept>)" + start + edge + BODY[mark])


def places(data: bytes) -> Iterator[tuple[int, int, list[bytes]]]:
    """Yield the parts of a text in which a token may stand, in order and apart, with the marks in each."""
    form, line, marks = data.translate(PLAIN), b"a" * RUN, MARKS
    begin, last, count = form.find(line), 0, 0
    while begin >= 0 and marks:
        end = form.find(b" ", begin + RUN)
        end = len(data) if end < 0 else end
        if DIGIT.search(data, begin, end) is not None:
            part = data[max(last, begin - BACK) : end]
            found, at = [mark for mark in marks if mark in part], end - len(part)
            if found:
                end = REST.match(data, end).end()  # type: ignore[union-attr]
                yield at, end, found
            last, count = end, count + 1
            if count == MANY:
                marks = tuple(mark for mark in MARKS if mark in data)
        begin = form.find(line, end)


def without(data: bytes, gone: bytes) -> bytes:
    """Return a text without tokens; the same object where there is none.

    >>> without(b"called with dapi0123456789abcdef0123456789abcdef today", b"[redacted]")
    b'called with [redacted] today'
    """
    pieces, copied = [], 0
    for begin, end, marks in places(data):
        found = [item for mark in marks for item in _form(mark).finditer(data, begin, end)]
        for item in sorted(found, key=lambda item: item.start()):
            if item.start() >= copied:
                pieces += [data[copied : item.start()], item["kept"], gone]
                copied = item.end()
    return b"".join([*pieces, data[copied:]]) if pieces else data
