/*
 * The form of an entry: ledger.chain.form in C, for entries of version 2.
 *
 * ``has_form`` answers 1 only for what has the form of an entry. It gives up, with 0, on whatever is unusual: a CONFLICT
 * entry, a number with an exponent or beyond 2^53 - 1, a name that is not plain ASCII. The twin decides then.
 */

#ifndef TALLYSTICK_ENTRY_FORM_H
#define TALLYSTICK_ENTRY_FORM_H

#include "_native.h"

#include <stdio.h>
#include <stdlib.h>

#define NESTING_MAX 64
#define INTEGER_MAX ((1LL << 53) - 1)
#define LOGICAL_MAX ((1LL << 32) - 1)
#define NODE_CHARS_MAX 63
#define ACTION_CHARS_MAX 64
#define JOB_ID_CHARS_MAX 128
#define SUBJECT_BYTES_MAX 255
#define ORIGIN_BYTES_MAX 4096
#define HASH_DIGITS 64
#define SURE_DIGITS_MAX 15  /* decimals of so many digits differ as binary64 (DBL_DIG) */
#define DOUBLE_DIGITS_MAX 17
#define TENANT_CHARS_MAX 63

/* One entry, as its source spells it. A text that is NULL is none. */
typedef struct {
    long long seq, physical, logical, version;
    Text hlc, node, job, action, prev, link, digest, payload, origin;
} Entry;

/* --- names -------------------------------------------------------------------------------------------------------- */

/* ledger.facts.events.TYPE_OF_ACTION. */
#define OWN(action) KNOWN(action, action, 0)
#define KNOWN(action, type, is_job_event) {{action, sizeof action - 1}, {type, sizeof type - 1}, is_job_event}
static const struct {
    Text action, type;
    int is_job_event;
} KNOWN_ACTIONS[] = {
    /* generated: actions, the most frequent first */
    KNOWN("ENQUEUE", "JobCreated", 1),
    KNOWN("DEQUEUE", "JobAccepted", 1),
    KNOWN("EXECUTE", "JobProgressReported", 1),
    KNOWN("COMPLETE", "JobCompleted", 1),
    KNOWN("FAIL", "JobFailed", 1),
    KNOWN("CANCEL", "JobCancellationRequested", 1),
    KNOWN("CANCEL_ACK", "JobCancellationAcked", 1),
    KNOWN("TIMEOUT", "JobTimedOut", 1),
    KNOWN("DISPATCH", "WorkflowDispatched", 1),
    KNOWN("WORKFLOW_COMPLETE", "WorkflowCompleted", 1),
    KNOWN("PROPOSED", "CommitmentProposed", 0),
    KNOWN("PROPOSE_ACCEPTED", "CommitmentProposed", 0),
    KNOWN("PROPOSE_REJECTED", "CommitmentProposed", 0),
    KNOWN("CAPACITY_SET", "CapacitySet", 0),
    KNOWN("REFUSED", "Refused", 0),
    OWN("TENANT_CREATED"), OWN("KEY_ADDED"), OWN("KEY_ROTATED"), OWN("KEY_REVOKED"), OWN("KEY_ADMITTED"),
    OWN("WAL_LOST"), OWN("LOG_FORKED"), OWN("BREAK_FOUND"), OWN("BREAK_ACKNOWLEDGED"), OWN("SUBJECT_ERASED"),
    OWN("PRIVACY_DECLARED"), OWN("ACT_ALLOWED"), OWN("ACCESS_REFUSED"), OWN("PAYLOADS_READ"), OWN("EPOCH_START"),
    OWN("TOKEN_ISSUED"), OWN("TOKEN_REVOKED"), OWN("WEBHOOK_ADDED"), OWN("WEBHOOK_REMOVED"),
    OWN("WEBHOOK_DEAD_LETTERED"), OWN("REGION_RETIRED"), OWN("REGION_ADMITTED"), OWN("LOG_EXCLUDED"),
    OWN("LOG_INCLUDED"), OWN("REGION_KEY_REVOKED"), OWN("RETENTION_SET"), OWN("HOLD_PLACED"), OWN("HOLD_RELEASED"),
    OWN("PRUNED"), OWN("CALLER_REGISTERED"), OWN("CALLER_REVOKED"), OWN("SIGNATURES_REQUIRED"),
    OWN("STATEMENT_REGISTERED"),
    /* generated: end */
};
enum { ACTIONS_KNOWN = sizeof KNOWN_ACTIONS / sizeof *KNOWN_ACTIONS };

/* Of two that are none, too. */
static inline int is_same_text(Text one, Text other)
{
    return one.count == other.count
        && (one.bytes == NULL || other.bytes == NULL ? one.bytes == other.bytes
                                                     : memcmp(one.bytes, other.bytes, (size_t)one.count) == 0);
}

static inline int order_of(Text one, Text other)
{
    const int order = memcmp(one.bytes, other.bytes, (size_t)(one.count < other.count ? one.count : other.count));
    return order != 0 ? order : (one.count > other.count) - (one.count < other.count);
}

static inline int is_text(Text text, const char *wanted)
{
    return is_same_text(text, (Text){wanted, (Py_ssize_t)strlen(wanted)});
}

/* What a character may stand in. */
enum { IN_TEXT = 1, IN_JOB_ID = 2, IN_NODE_ID = 4, IN_ACTION = 8, IN_TENANT_ID = 16 };
#define IN_NAMES (IN_TEXT | IN_JOB_ID | IN_NODE_ID | IN_TENANT_ID)
static const unsigned char MAY_STAND[256] = {
    [' ' ... '!'] = IN_TEXT,
    ['#' ... ','] = IN_TEXT,
    ['-'] = IN_NAMES,
    ['.'] = IN_TEXT | IN_JOB_ID,
    ['/'] = IN_TEXT,
    ['0' ... '9'] = IN_NAMES,
    [':'] = IN_TEXT | IN_JOB_ID,
    [';' ... '@'] = IN_TEXT,
    ['A' ... 'Z'] = IN_TEXT | IN_JOB_ID | IN_ACTION,
    ['['] = IN_TEXT,
    [']' ... '^'] = IN_TEXT,
    ['_'] = IN_TEXT | IN_JOB_ID | IN_ACTION | IN_TENANT_ID,
    ['`'] = IN_TEXT,
    ['a' ... 'z'] = IN_NAMES,
    ['{' ... 0x7f] = IN_TEXT,
};

/* Whether it has 1 to so many characters, which may all stand there. */
static int is_name_of(Text name, Py_ssize_t chars_max, unsigned char where)
{
    if (name.count < 1 || name.count > chars_max)
        return 0;
    for (Py_ssize_t i = 0; i < name.count; i++)
        if ((MAY_STAND[(unsigned char)name.bytes[i]] & where) == 0)
            return 0;
    return 1;
}

/* ledger.names.NODE_ID */
static int is_node_id(Text node)
{
    return is_name_of(node, NODE_CHARS_MAX, IN_NODE_ID) && node.bytes[0] != '-' && node.bytes[node.count - 1] != '-';
}

static int is_subject(Text subject)
{
    if (subject.count < 1 || subject.count > SUBJECT_BYTES_MAX)
        return 0;
    for (Py_ssize_t i = 0; i < subject.count; i++)
        if ((unsigned char)subject.bytes[i] < 0x20 || (unsigned char)subject.bytes[i] >= 0x80)
            return 0;
    return 1;
}

/* --- canonical JSON, judged where it stands ----------------------------------------------------------------------- */

typedef struct {
    const unsigned char *at, *end;
} Cursor;

/* What the members of the outermost object say that the form is about; a text that is NULL is none. */
typedef struct {
    Text type;
    long long fence; /* -1 where there is no such integer */
} Members;

static inline Cursor cursor_of(Text text)
{
    return (Cursor){(const unsigned char *)text.bytes, (const unsigned char *)text.bytes + text.count};
}

static int skips(Cursor *cursor, char wanted)
{
    if (cursor->at == cursor->end || *cursor->at != (unsigned char)wanted)
        return 0;
    cursor->at++;
    return 1;
}

static int skips_text(Cursor *cursor, const char *wanted)
{
    const size_t count = strlen(wanted);
    if ((size_t)(cursor->end - cursor->at) < count || memcmp(cursor->at, wanted, count) != 0)
        return 0;
    cursor->at += count;
    return 1;
}

/* What is behind a backslash, which is passed: RFC 8785 3.2.2.2. U+0000 has no form here. */
static int skips_escape(Cursor *cursor)
{
    static const char short_ones[] = "\"\\bfnrt", hex[] = "0123456789abcdef";
    if (cursor->at == cursor->end)
        return 0;
    const unsigned char letter = *cursor->at++;
    if (letter != 'u')
        return letter != 0 && strchr(short_ones, letter) != NULL;
    if (!skips_text(cursor, "00") || cursor->end - cursor->at < 2 || (cursor->at[0] != '0' && cursor->at[0] != '1'))
        return 0;
    const char *low = strchr(hex, cursor->at[1]);
    if (cursor->at[1] == 0 || low == NULL)
        return 0;
    const int code = (cursor->at[0] - '0') * 16 + (int)(low - hex);
    cursor->at += 2;
    return code != 0 && code != '\b' && code != '\f' && code != '\n' && code != '\r' && code != '\t';
}

/* One character beyond ASCII in UTF-8 (RFC 3629). */
static int skips_wide(Cursor *cursor)
{
    const unsigned char lead = *cursor->at;
    const int more = lead < 0xC2 ? 0 : lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : lead < 0xF5 ? 3 : 0;
    if (more == 0 || cursor->end - cursor->at <= more)
        return 0;
    const unsigned char second = cursor->at[1];
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90)
        || (lead == 0xF4 && second > 0x8F))
        return 0;
    for (int i = 1; i <= more; i++)
        if ((cursor->at[i] & 0xC0) != 0x80)
            return 0;
    cursor->at += more + 1;
    return 1;
}

/* A text behind its opening quote, and the quote that ends it; ``is_plain`` says that it is ASCII without escapes. */
static int skips_string(Cursor *cursor, Text *content, int *is_plain)
{
    const unsigned char *const from = cursor->at, *at = from;
    *is_plain = 1;
    for (;;) {
        while (at < cursor->end && (MAY_STAND[*at] & IN_TEXT) != 0)
            at++;
        cursor->at = at;
        if (at == cursor->end)
            return 0;
        if (*at == '"') {
            *content = (Text){(const char *)from, at - from};
            cursor->at++;
            return 1;
        }
        *is_plain = 0;
        if (*at == '\\') {
            cursor->at++;
            if (!skips_escape(cursor))
                return 0;
        }
        else if (*at < 0x80 || !skips_wide(cursor))
            return 0;
        at = cursor->at;
    }
}

/* Whether so many digits, of which the shortest form of the number that ``spelt`` spells cannot do without one, are
 * that form; it has more than SURE_DIGITS_MAX. */
static int is_shortest(const char *spelt, int digits)
{
    char printed[40];
    char *end;
    const double number = strtod(spelt, &end);
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    /* Below a power of two doubles lie closer: there the nearest decimal may not be the shortest. */
    if (*end != 0 || (bits & ((1ULL << 52) - 1)) == 0)
        return 0;
    snprintf(printed, sizeof printed, "%.*e", digits - 2, number);
    if (strtod(printed, NULL) == number)
        return 0;
    snprintf(printed, sizeof printed, "%.*e", digits - 1, number);
    /* The same digits, without point and exponent. */
    const char *at = spelt + (*spelt == '-'), *other = printed + (*printed == '-');
    while (*at == '0' || *at == '.')
        at++;
    for (int i = 0; i < digits; i++, at++, other++) {
        at += *at == '.';
        other += *other == '.';
        if (*at != *other)
            return 0;
    }
    return 1;
}

/* A number as ECMAScript prints it; ``integer`` is its value where it is a whole number from 0 on, else -1. */
static int skips_number(Cursor *cursor, long long *integer)
{
    char spelt[40];
    const unsigned char *from = cursor->at, *first;
    int digits = 0, is_fraction = 0;
    long long value = 0;
    const int is_negative = skips(cursor, '-');
    first = cursor->at;
    while (cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9' && digits <= DOUBLE_DIGITS_MAX) {
        value = 10 * value + (*cursor->at++ - '0');
        digits += value != 0;
    }
    if (cursor->at == first || (*first == '0' && cursor->at - first > 1))
        return 0;
    if (skips(cursor, '.')) {
        const unsigned char *fraction = cursor->at;
        is_fraction = 1;
        while (cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9' && digits <= DOUBLE_DIGITS_MAX) {
            digits += digits > 0 || *cursor->at != '0';
            cursor->at++;
        }
        /* Below 1e-6 there is an exponent. */
        if (cursor->at == fraction || cursor->at[-1] == '0' || (value == 0 && cursor->at - fraction > digits + 5))
            return 0;
    }
    if (cursor->at < cursor->end && (*cursor->at == 'e' || *cursor->at == 'E'))
        return 0;
    if (!is_fraction) {
        *integer = is_negative ? -1 : value;
        return digits <= DOUBLE_DIGITS_MAX && value <= INTEGER_MAX && !(is_negative && value == 0);
    }
    *integer = -1;
    if (digits <= SURE_DIGITS_MAX)
        return 1;
    const size_t count = (size_t)(cursor->at - from);
    if (digits > DOUBLE_DIGITS_MAX || count >= sizeof spelt)
        return 0;
    memcpy(spelt, from, count);
    spelt[count] = 0;
    return is_shortest(spelt, digits);
}

static int skips_value(Cursor *cursor, int room, Members *members);

/* Members behind the opening brace, and the brace that ends them; names ascend. ``members`` is NULL inside others. */
static int skips_members(Cursor *cursor, int room, Members *members)
{
    Text before = {NULL, 0};
    if (skips(cursor, '}'))
        return 1;
    do {
        Text name, text;
        int is_plain;
        if (!skips(cursor, '"') || !skips_string(cursor, &name, &is_plain) || !is_plain || !skips(cursor, ':'))
            return 0;
        if (before.bytes != NULL && order_of(before, name) >= 0)
            return 0;
        before = name;
        if (members != NULL && is_text(name, "type") && cursor->at < cursor->end && *cursor->at == '"') {
            cursor->at++;
            if (!skips_string(cursor, &text, &is_plain))
                return 0;
            members->type = is_plain ? text : (Text){NULL, 0};
        }
        else if (members != NULL && is_text(name, "fence_token") && cursor->at < cursor->end && *cursor->at >= '0'
                 && *cursor->at <= '9') {
            if (!skips_number(cursor, &members->fence))
                return 0;
        }
        else if (!skips_value(cursor, room, NULL))
            return 0;
    } while (skips(cursor, ','));
    return skips(cursor, '}');
}

static int skips_items(Cursor *cursor, int room)
{
    if (skips(cursor, ']'))
        return 1;
    do {
        if (!skips_value(cursor, room, NULL))
            return 0;
    } while (skips(cursor, ','));
    return skips(cursor, ']');
}

/* ``room`` is how many arrays and objects may be inside each other here. */
static int skips_value(Cursor *cursor, int room, Members *members)
{
    Text text;
    int is_plain;
    long long integer;
    if (cursor->at == cursor->end)
        return 0;
    switch (*cursor->at) {
    case '"':
        cursor->at++;
        return skips_string(cursor, &text, &is_plain);
    case '{':
        cursor->at++;
        return room > 0 && skips_members(cursor, room - 1, members);
    case '[':
        cursor->at++;
        return room > 0 && skips_items(cursor, room - 1);
    case 't':
        return skips_text(cursor, "true");
    case 'f':
        return skips_text(cursor, "false");
    case 'n':
        return skips_text(cursor, "null");
    default:
        return skips_number(cursor, &integer);
    }
}

/* Whether it is an object in canonical JSON, and what its members say. */
static int is_object(Text text, Members *members)
{
    Cursor cursor = cursor_of(text);
    *members = (Members){.fence = -1};
    return text.count > 0 && *cursor.at == '{' && skips_value(&cursor, NESTING_MAX, members) && cursor.at == cursor.end;
}

/* --- the form ----------------------------------------------------------------------------------------------------- */

static int skips_hash(Cursor *cursor)
{
    if (cursor->end - cursor->at < HASH_DIGITS)
        return 0;
    for (int i = 0; i < HASH_DIGITS; i++, cursor->at++)
        if (!(*cursor->at >= '0' && *cursor->at <= '9') && !(*cursor->at >= 'a' && *cursor->at <= 'f'))
            return 0;
    return 1;
}

static int is_origin(Text origin)
{
    Cursor cursor = cursor_of(origin);
    Text text;
    int is_plain;
    long long seq = 0;
    return origin.count <= ORIGIN_BYTES_MAX && skips_text(&cursor, "{\"bundle_digest\":\"") && skips_hash(&cursor)
        && skips_text(&cursor, "\",\"chain_link\":\"") && skips_hash(&cursor) && skips_text(&cursor, "\",\"log\":\"")
        && skips_string(&cursor, &text, &is_plain) && skips_text(&cursor, ",\"node_id\":\"")
        && skips_string(&cursor, &text, &is_plain) && skips_text(&cursor, ",\"seq\":") && skips_number(&cursor, &seq)
        && seq >= 1 && skips_text(&cursor, "}") && cursor.at == cursor.end;
}

/* Whether it has the form of an entry; the HLC is that of the columns beside it. */
static int has_form(const Entry *entry)
{
    Members members;
    if (entry->physical < 0 || entry->logical < 0 || entry->logical > LOGICAL_MAX || !is_node_id(entry->node)
        || !is_name_of(entry->action, ACTION_CHARS_MAX, IN_ACTION) || is_text(entry->action, "CONFLICT")
        || (entry->origin.bytes != NULL && !is_origin(entry->origin)) || !is_object(entry->payload, &members))
        return 0;
    for (int i = 0; i < ACTIONS_KNOWN; i++)
        if (is_same_text(entry->action, KNOWN_ACTIONS[i].action))
            return members.type.bytes != NULL && is_same_text(members.type, KNOWN_ACTIONS[i].type)
                && (KNOWN_ACTIONS[i].is_job_event ? members.fence >= 0 && is_name_of(entry->job, JOB_ID_CHARS_MAX, IN_JOB_ID)
                                                  : is_subject(entry->job));
    return is_subject(entry->job);
}

#endif
