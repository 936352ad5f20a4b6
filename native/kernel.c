/* What is done to each frame: encode, check, number and seal frames, a batch in one call. And `look`, which waits
 * without the interpreter's lock.
 *
 * tests/frame compares every function with NumPy and plain Python. Where a function does not apply it returns None,
 * with nothing done. The layout of a frame is that of ringlog/frame/layout.py; docs/format.md describes it.
 *
 * What must stay true:
 * - Buffers are private to the caller. No byte of a ring is looked at here: it is copied first, so nobody
 *   changes under us what was checked.
 * - Nothing is read or written outside of a buffer whatever its bytes say. A length is compared with what is
 *   left before it is used, in 64 bits, where it cannot wrap.
 * - No function calls back into Python while it holds pointers into objects.
 *
 * Only Python's stable interface (3.11) is used, so that one library serves every later version.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sched.h>
#include <time.h>
#endif

#define XXH_INLINE_ALL
#include "xxhash.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian, and so is this code"
#endif

enum { W_HEAD, W_TOPIC, W_BASE_SEQ, W_COMMIT_TS, W_COUNT_EPOCH, W_PRODUCER_ID, W_PRODUCER_SEQ, W_TAIL, W_BODY, W_SEAL };
enum { HEADER_WORDS = 10, HEADER_BYTES = 80, SEALED_BYTES = 72, LEN_BYTES = 4, FRAME_LEN_MIN = HEADER_BYTES - LEN_BYTES };
enum { S_POSITION, S_FIRST_SEQ, S_COMMIT_TS, S_COUNT_STATUS, S_HEAD_SEQ, S_EPOCH, S_TOPIC, S_PRODUCER_SEQ, ENTRY_WORDS };
enum { END_LIMIT, END_CLEAN, END_PARTIAL, END_PAD };
/* Columns of the table that `take` returns, behind the headers: one 64-bit word a frame each. */
enum { T_OFFSET, T_TOTAL, T_ACCOUNTED, T_LARGEST, T_FOLLOWS, T_COLUMNS };
enum { IS_RUN = 1, IS_EVEN = 2, HAS_FOLLOWS = 4 };

#define PAD_WORD 0xFFFFFFFFu
#define APPEND_PLAIN 0x0001010100000000ull /* payloads only, version 1, append: a header's first word without its length */
#define DURABILITY 0x03ull
#define PAYLOAD_KIND 0x30ull
#define FOLLOWS 0x80ull
#define FLAGS_SHIFT 40
#define KNOWN_TAIL (((DURABILITY | PAYLOAD_KIND | FOLLOWS) << FLAGS_SHIFT) | 0xFFFFFFFFull)
#define LOW32 0xFFFFFFFFull
#define PADDED(n) (((n) + 7) & ~(int64_t)7)

static uint64_t load(const uint8_t *at) { uint64_t word; memcpy(&word, at, 8); return word; }
static void store(uint8_t *at, uint64_t word) { memcpy(at, &word, 8); }
static uint32_t load32(const uint8_t *at) { uint32_t word; memcpy(&word, at, 4); return word; }

static int are_zeros(const uint8_t *at, int64_t count)
{
    while (count-- > 0)
        if (*at++) return 0;
    return 1;
}

/* ---- encoding ------------------------------------------------------------------------------------------------ */

typedef struct { const char *data; Py_ssize_t length; } Payload;

/* The items of a list or tuple of bytes, none longer than `longest`; 0, without an error set, for anything else. */
static int gather(PyObject *payloads, Py_ssize_t count, Py_ssize_t longest, Payload *found)
{
    int is_list = PyList_Check(payloads);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = is_list ? PyList_GetItem(payloads, i) : PyTuple_GetItem(payloads, i);
        char *data;
        if (item == NULL || PyBytes_AsStringAndSize(item, &data, &found[i].length) < 0) {
            PyErr_Clear();
            return 0;
        }
        found[i].data = data;
        if (found[i].length > longest) return 0;
    }
    return 1;
}

PyDoc_STRVAR(encode_doc,
"encode(payloads, records, header, record_max, total_max, /)\n--\n\n"
"Frames of `records` payloads each, the last one perhaps smaller, back to back.\n\n"
"`payloads`: list or tuple of bytes; `header`: 80 bytes, of which count, lengths, checksum and (from its value on)\n"
"producer_seq are filled in. Returns (bytearray, bytes of (frames + 1,) int64 offsets), or None where a payload is\n"
"not bytes or a limit, in bytes, is exceeded.");

static PyObject *encode(PyObject *self, PyObject *args)
{
    PyObject *payloads, *buffer = NULL, *offsets = NULL, *found = NULL;
    Py_ssize_t records, record_max, total_max;
    Payload *items = NULL;
    const char *header;
    Py_ssize_t header_bytes;
    if (!PyArg_ParseTuple(args, "Ony#nn", &payloads, &records, &header, &header_bytes, &record_max, &total_max))
        return NULL;
    int is_list = PyList_Check(payloads);
    if (header_bytes != HEADER_BYTES || records < 1 || records > INT32_MAX || record_max > INT32_MAX
        || (!is_list && !PyTuple_Check(payloads)))
        Py_RETURN_NONE;
    Py_ssize_t count = is_list ? PyList_Size(payloads) : PyTuple_Size(payloads);
    if (count < 1) Py_RETURN_NONE;
    Py_ssize_t frames = (count + records - 1) / records;
    int64_t total = 0;
    items = PyMem_Malloc((size_t)count * sizeof *items);
    if (items == NULL) return PyErr_NoMemory();
    if (!gather(payloads, count, record_max, items)) goto none;
    offsets = PyBytes_FromStringAndSize(NULL, (frames + 1) * 8);
    if (offsets == NULL) goto done;
    uint8_t *places = (uint8_t *)PyBytes_AsString(offsets);
    for (Py_ssize_t frame = 0, i = 0; frame < frames; frame++) {
        store(places + frame * 8, (uint64_t)total);
        Py_ssize_t stop = i + records < count ? i + records : count;
        int64_t held = stop - i, data = 0;
        for (; i < stop; i++) data += items[i].length;
        total += HEADER_BYTES + PADDED(4 * (held + 1)) + PADDED(data);
        if (data > INT32_MAX || total > total_max) goto none;
    }
    store(places + frames * 8, (uint64_t)total);
    buffer = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)total);
    if (buffer == NULL) goto done;
    uint8_t *at = (uint8_t *)PyByteArray_AsString(buffer);
    uint64_t seq = load((const uint8_t *)header + W_PRODUCER_SEQ * 8);
    for (Py_ssize_t frame = 0, i = 0; frame < frames; frame++) {
        Py_ssize_t stop = i + records < count ? i + records : count;
        int64_t held = stop - i;
        int64_t size = (int64_t)(load(places + frame * 8 + 8) - load(places + frame * 8));
        uint8_t *ends = at + HEADER_BYTES, *data = ends + PADDED(4 * (held + 1)), *next = data;
        memcpy(at, header, HEADER_BYTES);
        store(at + W_HEAD * 8, (load(at + W_HEAD * 8) & ~LOW32) | (uint64_t)(size - LEN_BYTES));
        store(at + W_COUNT_EPOCH * 8, (load(at + W_COUNT_EPOCH * 8) & ~LOW32) | (uint64_t)held);
        store(at + W_PRODUCER_SEQ * 8, seq + (uint64_t)frame);
        store(at + W_TAIL * 8, (load(at + W_TAIL * 8) & ~LOW32) | (uint64_t)(size - HEADER_BYTES));
        store(data - 8, 0); /* the padding of the offsets, if there is any */
        memset(ends, 0, 4);
        for (Py_ssize_t k = 1; i < stop; i++, k++) {
            memcpy(next, items[i].data, (size_t)items[i].length);
            next += items[i].length;
            uint32_t end = (uint32_t)(next - data);
            memcpy(ends + 4 * k, &end, 4);
        }
        memset(next, 0, (size_t)(at + size - next));
        store(at + W_BODY * 8, XXH3_64bits(ends, (size_t)(size - HEADER_BYTES)));
        at += size;
    }
    found = PyTuple_Pack(2, buffer, offsets);
    goto done;
none:
    found = Py_NewRef(Py_None);
done:
    PyMem_Free(items);
    Py_XDECREF(buffer);
    Py_XDECREF(offsets);
    return found;
}

/* ---- checking ------------------------------------------------------------------------------------------------ */

/* Is this a sound frame of payloads alone, as a producer may send it? Its sizes, if so. */
static int is_sound(const uint8_t *frame, int64_t total, uint64_t seq_max, uint64_t *accounted, uint64_t *largest)
{
    uint64_t head = load(frame), tail = load(frame + W_TAIL * 8);
    uint64_t count = load(frame + W_COUNT_EPOCH * 8) & LOW32;
    if ((head & ~LOW32) != APPEND_PLAIN || (tail & ~KNOWN_TAIL) || (tail & LOW32) != (uint64_t)(total - HEADER_BYTES))
        return 0;
    if ((tail >> FLAGS_SHIFT & PAYLOAD_KIND) == PAYLOAD_KIND || count == 0 || count > (uint64_t)total / 4) return 0;
    if (load(frame + W_BASE_SEQ * 8) > seq_max + 1 - count || load(frame + W_COMMIT_TS * 8) > seq_max) return 0;
    if (load(frame + W_PRODUCER_ID * 8) == 0 || load(frame + W_PRODUCER_SEQ * 8) == 0) return 0;
    const uint8_t *ends = frame + HEADER_BYTES;
    int64_t body = total - HEADER_BYTES, data_at = PADDED(4 * ((int64_t)count + 1));
    if (data_at > body || load32(ends) != 0) return 0;
    uint32_t before = 0, longest = 0;
    for (uint64_t i = 1; i <= count; i++) {
        uint32_t end = load32(ends + 4 * i);
        if (end < before || end > INT32_MAX) return 0;
        if (end - before > longest) longest = end - before;
        before = end;
    }
    if (data_at + PADDED((int64_t)before) != body) return 0;
    if (!are_zeros(ends + 4 * (count + 1), data_at - 4 * ((int64_t)count + 1))) return 0;
    if (!are_zeros(ends + data_at + before, body - data_at - before)) return 0;
    if (XXH3_64bits(ends, (size_t)body) != load(frame + W_BODY * 8)) return 0;
    *accounted = before;
    *largest = longest;
    return 1;
}

PyDoc_STRVAR(take_doc,
"take(buffer, frames_max, frame_max, seq_max, position, /)\n--\n\n"
"Find, lift and check the frames that lie back to back from the buffer's beginning.\n\n"
"Returns (table, entries, count, stop, end, is_sound, flags, bytes, largest, records). `table`: a bytearray of `count` rows of\n"
"10 words, the headers, behind them five stretches of `count` words: offsets, whole sizes, accounted bytes, largest\n"
"records, FOLLOWS. `stop`: behind the last frame. `end`: 0 as many as were asked for, 1 nothing follows, 2 a part of\n"
"one, 3 padding. What comes then, and the last three stretches, hold only if `is_sound`: all are sound frames of\n"
"payloads alone. Then their flag FOLLOWS is taken off, in headers and buffer. `flags`: 1 one topic, epoch, producer\n"
"and class, with numbers that follow each other; 2 as many records in each; 4 FOLLOWS was on one. `bytes`: accounted,\n"
"of all; `largest`, `records`: the most of any. `entries`: a bytearray of `count` rows of 8 words with position\n"
"(`position` is that of the buffer's first byte), topic and producer_seq. None where what follows is no frame.");

/* What frames of one run share beside topic and producer: the upper halves of these words, FOLLOWS apart. */
static int are_alike(const uint8_t *a, const uint8_t *b)
{
    return load(a + W_TOPIC * 8) == load(b + W_TOPIC * 8) && load(a + W_PRODUCER_ID * 8) == load(b + W_PRODUCER_ID * 8)
        && load(a + W_COUNT_EPOCH * 8) >> 32 == load(b + W_COUNT_EPOCH * 8) >> 32
        && ((load(a + W_TAIL * 8) ^ load(b + W_TAIL * 8)) & ~LOW32 & ~(FOLLOWS << FLAGS_SHIFT)) == 0;
}

static PyObject *take(PyObject *self, PyObject *args)
{
    Py_buffer view;
    Py_ssize_t frames_max;
    unsigned long long frame_max, seq_max, position;
    if (!PyArg_ParseTuple(args, "w*nKKK", &view, &frames_max, &frame_max, &seq_max, &position)) return NULL;
    uint8_t *start = view.buf;
    int64_t limit = view.len, at = 0;
    Py_ssize_t count = 0;
    int end = -1;
    PyObject *table = NULL, *entries = NULL, *found = NULL;
    while (end < 0) {
        if (limit - at < 8) {
            if (limit != at) goto none;
            end = END_CLEAN;
            break;
        }
        if (count >= frames_max) {
            end = END_LIMIT;
            break;
        }
        uint64_t head = load(start + at);
        uint64_t length = head & LOW32, total = length + LEN_BYTES;
        if (length == 0) {
            if (head >> 32) goto none;
            end = END_CLEAN;
        } else if (length == PAD_WORD) {
            end = END_PAD;
        } else if (length < FRAME_LEN_MIN || total & 7 || total > frame_max) {
            goto none;
        } else if ((int64_t)total > limit - at) {
            end = END_PARTIAL;
        } else {
            at += (int64_t)total;
            count++;
        }
    }
    int64_t stop = at;
    table = PyByteArray_FromStringAndSize(NULL, count * (HEADER_WORDS + T_COLUMNS) * 8);
    entries = PyByteArray_FromStringAndSize(NULL, count * ENTRY_WORDS * 8);
    if (table == NULL || entries == NULL) goto failed;
    uint8_t *entry = (uint8_t *)PyByteArray_AsString(entries);
    memset(entry, 0, (size_t)count * ENTRY_WORDS * 8);
    uint8_t *headers = (uint8_t *)PyByteArray_AsString(table), *columns = headers + count * HEADER_BYTES;
    int sound = 1, flags = IS_RUN | IS_EVEN;
    uint64_t accounted = 0, largest = 0, bytes = 0, most = 0, records = 0;
    at = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *frame = start + at;
        uint8_t *row = headers + i * HEADER_BYTES;
        int64_t total = (int64_t)(load(frame) & LOW32) + LEN_BYTES;
        memcpy(row, frame, HEADER_BYTES);
        store(columns + (T_OFFSET * count + i) * 8, (uint64_t)at);
        store(columns + (T_TOTAL * count + i) * 8, (uint64_t)total);
        sound = sound && is_sound(frame, total, seq_max, &accounted, &largest);
        if (!sound) accounted = largest = 0;
        uint64_t held = load(row + W_COUNT_EPOCH * 8) & LOW32, tail = load(row + W_TAIL * 8);
        bytes += accounted;
        if (largest > most) most = largest;
        if (held > records) records = held;
        if (tail >> FLAGS_SHIFT & FOLLOWS) flags |= HAS_FOLLOWS;
        if (i && held != (load(row - HEADER_BYTES + W_COUNT_EPOCH * 8) & LOW32)) flags &= ~IS_EVEN;
        if (i && (!are_alike(row, row - HEADER_BYTES)
                  || load(row + W_PRODUCER_SEQ * 8) != load(row - HEADER_BYTES + W_PRODUCER_SEQ * 8) + 1))
            flags &= ~IS_RUN;
        store(columns + (T_ACCOUNTED * count + i) * 8, accounted);
        store(columns + (T_LARGEST * count + i) * 8, largest);
        store(columns + (T_FOLLOWS * count + i) * 8, tail >> FLAGS_SHIFT & FOLLOWS);
        store(entry + S_POSITION * 8, position + (uint64_t)at);
        store(entry + S_TOPIC * 8, load(row + W_TOPIC * 8));
        store(entry + S_PRODUCER_SEQ * 8, load(row + W_PRODUCER_SEQ * 8));
        entry += ENTRY_WORDS * 8;
        at += total;
    }
    for (Py_ssize_t i = 0; sound && flags & HAS_FOLLOWS && i < count; i++) {
        uint8_t *row = headers + i * HEADER_BYTES;
        uint64_t tail = load(row + W_TAIL * 8) & ~(FOLLOWS << FLAGS_SHIFT);
        store(row + W_TAIL * 8, tail);
        store(start + load(columns + (T_OFFSET * count + i) * 8) + W_TAIL * 8, tail);
    }
    found = Py_BuildValue("OOnLiiiKKK", table, entries, count, (long long)stop, end, sound, flags, bytes, most,
                          records);
failed:
    Py_XDECREF(table);
    Py_XDECREF(entries);
    PyBuffer_Release(&view);
    return found;
none:
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* ---- numbering and sealing ----------------------------------------------------------------------------------- */

PyDoc_STRVAR(number_doc,
"number(words, entries, start, stop, first, stamp, epoch, durability, /)\n--\n\n"
"Give rows [start, stop) of `words`, (n, 10) uint64, numbers from `first` on, stamp, epoch and class, and note them in\n"
"the same rows of `entries`, (n, 8) uint64. Returns the number behind the last record.");

static PyObject *number(PyObject *self, PyObject *args)
{
    Py_buffer words, entries;
    Py_ssize_t start, stop;
    unsigned long long first, stamp, epoch, durability;
    if (!PyArg_ParseTuple(args, "w*w*nnKKKK", &words, &entries, &start, &stop, &first, &stamp, &epoch, &durability))
        return NULL;
    PyObject *found = NULL;
    if (start < 0 || start > stop || stop > words.len / HEADER_BYTES || stop > entries.len / (ENTRY_WORDS * 8)) {
        PyErr_SetString(PyExc_ValueError, "rows are outside of the matrix");
        goto done;
    }
    uint64_t next = first;
    for (Py_ssize_t i = start; i < stop; i++) {
        uint8_t *row = (uint8_t *)words.buf + i * HEADER_BYTES, *entry = (uint8_t *)entries.buf + i * ENTRY_WORDS * 8;
        uint64_t count = load(row + W_COUNT_EPOCH * 8) & LOW32, tail = load(row + W_TAIL * 8);
        store(row + W_BASE_SEQ * 8, next);
        store(row + W_COMMIT_TS * 8, stamp);
        store(row + W_COUNT_EPOCH * 8, count | epoch << 32);
        store(row + W_TAIL * 8, (tail & ~(DURABILITY << FLAGS_SHIFT)) | (durability & DURABILITY) << FLAGS_SHIFT);
        store(entry + S_FIRST_SEQ * 8, next);
        store(entry + S_COMMIT_TS * 8, stamp);
        store(entry + S_COUNT_STATUS * 8, count);
        store(entry + S_EPOCH * 8, epoch);
        next += count;
    }
    for (Py_ssize_t i = start; i < stop; i++)
        store((uint8_t *)entries.buf + (i * ENTRY_WORDS + S_HEAD_SEQ) * 8, next - 1);
    found = PyLong_FromUnsignedLongLong(next);
done:
    PyBuffer_Release(&words);
    PyBuffer_Release(&entries);
    return found;
}

PyDoc_STRVAR(seal_doc,
"seal(buffer, offsets, words, start, stop, salt, /)\n--\n\n"
"Seal the headers in rows [start, stop) of `words`, (n, 10) uint64, and write them over those that lie in `buffer` at\n"
"byte `offsets`, (n,) int64. Returns the last seal.");

static PyObject *seal(PyObject *self, PyObject *args)
{
    Py_buffer buffer, offsets, words;
    Py_ssize_t start, stop;
    unsigned long long salt;
    if (!PyArg_ParseTuple(args, "w*y*w*nnK", &buffer, &offsets, &words, &start, &stop, &salt)) return NULL;
    PyObject *found = NULL;
    if (start < 0 || start >= stop || stop > words.len / HEADER_BYTES || stop > offsets.len / 8) goto outside;
    uint64_t last = 0;
    for (Py_ssize_t i = start; i < stop; i++) {
        uint8_t *row = (uint8_t *)words.buf + i * HEADER_BYTES;
        int64_t at = (int64_t)load((const uint8_t *)offsets.buf + i * 8);
        if (at < 0 || at > buffer.len - HEADER_BYTES) goto outside;
        last = XXH3_64bits_withSeed(row, SEALED_BYTES, salt);
        store(row + W_SEAL * 8, last);
        memcpy((uint8_t *)buffer.buf + at, row, HEADER_BYTES);
    }
    found = PyLong_FromUnsignedLongLong(last);
    goto done;
outside:
    PyErr_SetString(PyExc_ValueError, "rows are outside of what there is");
done:
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&words);
    return found;
}

PyDoc_STRVAR(stamp_doc,
"stamp(buffer, offsets, topic_id, epoch, producer_id, first_seq, follows, /)\n--\n\n"
"Write identity into the headers that begin at byte `offsets`, (n + 1,) int64 of which the last is not one: frame i\n"
"gets producer_seq first_seq + i and follows the one before, the first one if `follows`. Returns the size in bytes\n"
"that all frames have, or 0 where they differ.");

static PyObject *stamp(PyObject *self, PyObject *args)
{
    Py_buffer buffer, offsets;
    unsigned long long topic_id, epoch, producer_id, first_seq;
    int follows;
    if (!PyArg_ParseTuple(args, "w*y*KKKKp", &buffer, &offsets, &topic_id, &epoch, &producer_id, &first_seq, &follows))
        return NULL;
    PyObject *found = NULL;
    int64_t size = 0;
    for (Py_ssize_t i = 0; i + 1 < offsets.len / 8; i++) {
        int64_t at = (int64_t)load((const uint8_t *)offsets.buf + i * 8);
        int64_t total = (int64_t)load((const uint8_t *)offsets.buf + (i + 1) * 8) - at;
        size = i == 0 || size == total ? total : 0;
        if (at < 0 || at > buffer.len - HEADER_BYTES) {
            PyErr_SetString(PyExc_ValueError, "offsets are outside of the buffer");
            goto done;
        }
        uint8_t *row = (uint8_t *)buffer.buf + at;
        uint64_t tail = load(row + W_TAIL * 8) & ~(FOLLOWS << FLAGS_SHIFT);
        store(row + W_TOPIC * 8, topic_id);
        store(row + W_COUNT_EPOCH * 8, (load(row + W_COUNT_EPOCH * 8) & LOW32) | epoch << 32);
        store(row + W_PRODUCER_ID * 8, producer_id);
        store(row + W_PRODUCER_SEQ * 8, first_seq + (uint64_t)i);
        store(row + W_TAIL * 8, i || follows ? tail | FOLLOWS << FLAGS_SHIFT : tail);
    }
    found = PyLong_FromLongLong(size);
done:
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&offsets);
    return found;
}

/* ---- waiting ------------------------------------------------------------------------------------------------- */

/* Looks at the clock are this far apart: some hundred nanoseconds, in which a sibling of this processor has it all. */
enum { PAUSES = 16 };
#define LOOK_NS_MAX 1000000000ull

#ifdef _WIN32
static uint64_t monotonic_ns(void)
{
    LARGE_INTEGER now, second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&second);
    return (uint64_t)((double)now.QuadPart * 1e9 / (double)second.QuadPart);
}

static void offer_processor(void) { SwitchToThread(); }
static uint64_t load_acquire(const uint64_t *at)
{
    uint64_t word = *(const volatile uint64_t *)at;
    MemoryBarrier();
    return word;
}
#else
static uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void offer_processor(void) { sched_yield(); }
static uint64_t load_acquire(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
#endif

static void pause_briefly(void)
{
    for (int i = 0; i < PAUSES; i++) {
#if defined(_WIN32)
        YieldProcessor();
#elif defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

PyDoc_STRVAR(look_doc,
"look(words, seen, ns, /)\n--\n\n"
"Look at words of shared memory, without the interpreter's lock, until one is another than was seen or `ns`\n"
"nanoseconds, at most a second, are over; True for the former. The processor is offered to others meanwhile.\n\n"
"words  list of up to WORDS_MAX buffers that begin with a word, at a multiple of 8\n"
"seen   list of as many integers");

enum { WORDS_MAX = 64, LOOKS_PER_YIELD = 8 };

static int differs(const uint64_t *const *words, const uint64_t *seen, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (load_acquire(words[i]) != seen[i]) return 1;
    return 0;
}

static PyObject *look(PyObject *self, PyObject *args)
{
    PyObject *words, *seen, *found = NULL;
    unsigned long long ns;
    Py_buffer buffers[WORDS_MAX];
    const uint64_t *places[WORDS_MAX];
    uint64_t values[WORDS_MAX];
    Py_ssize_t held = 0;
    if (!PyArg_ParseTuple(args, "O!O!K", &PyList_Type, &words, &PyList_Type, &seen, &ns)) return NULL;
    const Py_ssize_t count = PyList_Size(words);
    if (count > WORDS_MAX || count != PyList_Size(seen) || ns > LOOK_NS_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many words, not as many values, or longer than a second");
        return NULL;
    }
    for (; held < count; held++) {
        values[held] = PyLong_AsUnsignedLongLong(PyList_GetItem(seen, held));
        if (PyErr_Occurred()) goto done;
        if (PyObject_GetBuffer(PyList_GetItem(words, held), &buffers[held], PyBUF_SIMPLE)) goto done;
        places[held] = buffers[held].buf;
        if (buffers[held].len < 8 || (uintptr_t)places[held] & 7) {
            held++;
            PyErr_SetString(PyExc_ValueError, "no word, or not at a multiple of 8");
            goto done;
        }
    }
    int is_there = differs(places, values, count);
    if (!is_there && ns) {
        Py_BEGIN_ALLOW_THREADS
        const uint64_t end = monotonic_ns() + ns;
        for (int i = 1; !is_there && monotonic_ns() < end; i++) {
            pause_briefly();
            /* Who is to change the word may be waiting for this very processor. */
            if (!(i % LOOKS_PER_YIELD)) offer_processor();
            is_there = differs(places, values, count);
        }
        Py_END_ALLOW_THREADS
    }
    found = PyBool_FromLong(is_there);
done:
    while (held > 0) PyBuffer_Release(&buffers[--held]);
    return found;
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, encode_doc},
    {"take", take, METH_VARARGS, take_doc},
    {"number", number, METH_VARARGS, number_doc},
    {"seal", seal, METH_VARARGS, seal_doc},
    {"stamp", stamp, METH_VARARGS, stamp_doc},
    {"look", look, METH_VARARGS, look_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", "The commit path's per-frame work, and a wait, compiled; see native/kernel.c.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&module);
}
