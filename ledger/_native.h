/* What the functions in C have in common: values of Python taken apart, integers written. */

#ifndef TALLYSTICK_NATIVE_H
#define TALLYSTICK_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

/* What a library that Python has loaded has under this name; NULL, and an ImportError, when none has it. */
static inline void *symbol_of(const char *const *libraries, const char *name)
{
    for (; *libraries != NULL; libraries++) {
        void *library = dlopen(*libraries, RTLD_LAZY | RTLD_NOLOAD);
        void *found = library == NULL ? NULL : dlsym(library, name);
        if (found != NULL)
            return found;
    }
    PyErr_Format(PyExc_ImportError, "no library that Python has loaded has %s", name);
    return NULL;
}

typedef struct {
    const char *bytes;
    Py_ssize_t count;
} Text;

/* The UTF-8 of a str; 0 for anything else, and for what has no UTF-8. */
static inline int text_of(PyObject *value, Text *text)
{
    if (!PyUnicode_CheckExact(value))
        return 0;
    text->bytes = PyUnicode_AsUTF8AndSize(value, &text->count);
    if (text->bytes == NULL)
        PyErr_Clear();
    return text->bytes != NULL;
}

/* The value of an int that fits 64 bits; 0 for anything else, a bool too. */
static inline int number_of(PyObject *value, long long *number)
{
    int overflow;
    if (!PyLong_CheckExact(value))
        return 0;
    *number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0;
}

static inline int bytes_of(PyObject *value, Text *text)
{
    if (!PyBytes_CheckExact(value))
        return 0;
    text->bytes = PyBytes_AS_STRING(value);
    text->count = PyBytes_GET_SIZE(value);
    return 1;
}

static inline uint32_t u32_at(const unsigned char *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline uint64_t u64_at(const unsigned char *at)
{
    return (uint64_t)u32_at(at) << 32 | u32_at(at + 4);
}

static inline unsigned char *put_u32(unsigned char *at, uint32_t value)
{
    for (int shift = 24; shift >= 0; shift -= 8)
        *at++ = (unsigned char)(value >> shift);
    return at;
}

static inline unsigned char *put_u64(unsigned char *at, uint64_t value)
{
    return put_u32(put_u32(at, (uint32_t)(value >> 32)), (uint32_t)value);
}

static inline unsigned char *put(unsigned char *at, const void *bytes, size_t count)
{
    memcpy(at, bytes, count);
    return at + count;
}

/* What a function answers: what it found, or None where that is not whole and nothing failed. */
static inline PyObject *answer_of(PyObject *found, int is_whole)
{
    if (is_whole)
        return found;
    Py_XDECREF(found);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* Puts a new reference into a list or a tuple; 0 where it is NULL. */
static inline int set_item(PyObject *items, Py_ssize_t at, PyObject *value)
{
    if (value != NULL && PyList_CheckExact(items))
        PyList_SET_ITEM(items, at, value);
    else if (value != NULL)
        PyTuple_SET_ITEM(items, at, value);
    return value != NULL;
}

#define METHOD(name, function, flags) {#name, (PyCFunction)(void (*)(void))function, flags, NULL}

/* Columns of one batch, as many values of one as of the other. */
typedef struct {
    PyObject *kept[16];
    PyObject **values[16];
    int columns;
    Py_ssize_t rows;
} Batch;

static inline void release(Batch *batch)
{
    while (batch->columns > 0)
        Py_DECREF(batch->kept[--batch->columns]);
}

/* 0 when a column is no sequence, or they differ in length. */
static inline int take(Batch *batch, PyObject *const *columns, int count)
{
    batch->columns = 0;
    for (int i = 0; i < count; i++) {
        PyObject *kept = PySequence_Fast(columns[i], "a column is not a sequence");
        if (kept == NULL) {
            PyErr_Clear();
            release(batch);
            return 0;
        }
        batch->kept[batch->columns++] = kept;
        batch->values[i] = PySequence_Fast_ITEMS(kept);
        if (i == 0)
            batch->rows = PySequence_Fast_GET_SIZE(kept);
        else if (batch->rows != PySequence_Fast_GET_SIZE(kept)) {
            release(batch);
            return 0;
        }
    }
    return 1;
}

#endif
