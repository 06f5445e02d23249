/*
 * Who waits for a position of a node, and is told once it is reached (docs/decisions/0037).
 *
 * The twin in Python, app.runtime.state.node.PythonPlaces, is the specification. What is waited on are asyncio's own futures, made
 * by the loop: here are only their places, in the order of the positions. Belongs to one event loop, so whoever calls
 * has the interpreter's lock, and nothing else guards what is here. What a call of Python's may change is looked at
 * again behind it.
 */

#include "../../../ledger/_native.h"

#include <math.h>
#include <stddef.h>
#include <structmember.h>

#define PLACES_MIN 64

typedef struct {
    long long lsn;
    double ends_s, timeout_s;
    PyObject *future;
} Place;

typedef struct {
    PyObject_HEAD
    long long lsn, wanted_lsn;
    double looks_at_s;             /* when the deadlines are looked at next: at the first of them, or before */
    PyObject *on_wanted, *failure; /* or None */
    PyObject *create_future, *time; /* of the loop, once it is known */
    double came_s, timeout_s, ends_s; /* when the last came, and until when he waits */
    Place *places; /* from first on, count of them; room for size */
    Py_ssize_t first, count, size;
} Places;

static PyObject *get_running_loop, *invalid_state_error;
static PyObject *name_create_future, *name_time, *name_set_result, *name_set_exception, *name_look_at;

/* Before it is set, and while it is collected, a member is NULL. */
static int is_none(const PyObject *member)
{
    return member == NULL || member == Py_None;
}

/* Where a position that comes now is to stand: behind all that are not higher. */
static Py_ssize_t behind(const Places *places, long long lsn)
{
    Py_ssize_t low = 0, high = places->count;
    if (high == 0 || places->places[places->first + high - 1].lsn <= lsn)
        return high;
    while (low < high) {
        const Py_ssize_t middle = (low + high) / 2;
        if (places->places[places->first + middle].lsn <= lsn)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Take this one in; it keeps the future. 0 when there is no memory. */
static int insert(Places *places, const Place *place)
{
    if (places->first + places->count == places->size) {
        if (places->first > places->count) {
            memcpy(places->places, places->places + places->first, (size_t)places->count * sizeof(Place));
            places->first = 0;
        } else {
            const Py_ssize_t size = places->size == 0 ? PLACES_MIN : 2 * places->size;
            Place *grown = PyMem_Realloc(places->places, (size_t)size * sizeof(Place));
            if (grown == NULL) {
                PyErr_NoMemory();
                return 0;
            }
            places->places = grown;
            places->size = size;
        }
    }
    const Py_ssize_t at = behind(places, place->lsn);
    Place *where = places->places + places->first + at;
    memmove(where + 1, where, (size_t)(places->count - at) * sizeof(Place));
    *where = *place;
    Py_INCREF(place->future);
    places->count++;
    return 1;
}

/* The first count of them wait no more: their futures, which are the caller's now; NULL with an error. */
static PyObject **leave_first(Places *places, Py_ssize_t count)
{
    PyObject **futures = PyMem_Malloc((size_t)(count + 1) * sizeof(PyObject *));
    if (futures == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        futures[i] = places->places[places->first + i].future;
    places->count -= count;
    places->first = places->count == 0 ? 0 : places->first + count;
    return futures;
}

static int begin(Places *places)
{
    PyObject *loop = PyObject_CallNoArgs(get_running_loop);
    if (loop == NULL)
        return 0;
    places->create_future = PyObject_GetAttr(loop, name_create_future);
    places->time = PyObject_GetAttr(loop, name_time);
    Py_DECREF(loop);
    if (places->create_future != NULL && places->time != NULL)
        return 1;
    Py_CLEAR(places->create_future);
    return 0;
}

static int want_lsn(Places *places, long long lsn)
{
    if (lsn <= places->wanted_lsn)
        return 1;
    places->wanted_lsn = lsn;
    if (is_none(places->on_wanted))
        return 1;
    PyObject *on_wanted = Py_NewRef(places->on_wanted), *answer = PyObject_CallNoArgs(on_wanted);
    Py_DECREF(on_wanted);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* Have Python look at the deadlines at this time. */
static int look_at(Places *places, double ends_s)
{
    places->looks_at_s = ends_s;
    PyObject *at = PyFloat_FromDouble(ends_s);
    PyObject *answer = at == NULL ? NULL : PyObject_CallMethodOneArg((PyObject *)places, name_look_at, at);
    Py_XDECREF(at);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* Set when who comes now with this timeout waits no longer, and see that it is looked at in time. */
static int come(Places *places, double timeout_s)
{
    PyObject *time = PyObject_CallNoArgs(places->time);
    if (time == NULL)
        return 0;
    const double now_s = PyFloat_AsDouble(time);
    Py_DECREF(time);
    if (now_s == -1.0 && PyErr_Occurred())
        return 0;
    if (now_s == places->came_s && timeout_s == places->timeout_s)
        return 1;
    places->came_s = now_s;
    places->timeout_s = timeout_s;
    places->ends_s = now_s + timeout_s;
    return !(places->ends_s < places->looks_at_s) || look_at(places, places->ends_s);
}

/* reached(lsn, timeout_s=inf, /): as app.runtime.state.node.PythonPlaces. */
static PyObject *reached(Places *places, PyObject *const *args, Py_ssize_t count)
{
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "reached takes a position and a timeout");
        return NULL;
    }
    const long long lsn = PyLong_AsLongLong(args[0]);
    const double timeout_s = count == 2 ? PyFloat_AsDouble(args[1]) : Py_HUGE_VAL;
    if (PyErr_Occurred() || (places->create_future == NULL && !begin(places)))
        return NULL;
    PyObject *future = PyObject_CallNoArgs(places->create_future);
    if (future == NULL)
        return NULL;
    PyObject *answer = NULL;
    if (places->lsn >= lsn)
        answer = PyObject_CallMethodOneArg(future, name_set_result, Py_None);
    else if (!is_none(places->failure)) {
        PyObject *failure = Py_NewRef(places->failure);
        answer = PyObject_CallMethodOneArg(future, name_set_exception, failure);
        Py_DECREF(failure);
    } else if (want_lsn(places, lsn) && come(places, timeout_s)) {
        const Place place = {lsn, places->ends_s, timeout_s, future};
        answer = insert(places, &place) ? Py_NewRef(Py_None) : NULL;
    }
    if (answer == NULL)
        Py_CLEAR(future);
    Py_XDECREF(answer);
    return future;
}

/* want(lsn): as app.runtime.state.node.PythonPlaces. */
static PyObject *want(Places *places, PyObject *value)
{
    const long long lsn = PyLong_AsLongLong(value);
    if (PyErr_Occurred() || !want_lsn(places, lsn))
        return NULL;
    Py_RETURN_NONE;
}

/* advance(lsn): as app.runtime.state.node.PythonPlaces. */
static PyObject *advance(Places *places, PyObject *value)
{
    const long long lsn = PyLong_AsLongLong(value);
    if (PyErr_Occurred())
        return NULL;
    if (lsn <= places->lsn)
        Py_RETURN_NONE;
    places->lsn = lsn;
    const Py_ssize_t count = behind(places, lsn);
    PyObject **futures = leave_first(places, count);
    if (futures == NULL)
        return NULL;
    int is_told = 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *answer = is_told ? PyObject_CallMethodOneArg(futures[i], name_set_result, Py_None) : NULL;
        if (answer == NULL && is_told) {
            is_told = PyErr_ExceptionMatches(invalid_state_error); /* who stopped waiting needs not be told */
            if (is_told)
                PyErr_Clear();
        }
        Py_XDECREF(answer);
        Py_DECREF(futures[i]);
    }
    PyMem_Free(futures);
    if (!is_told)
        return NULL;
    Py_RETURN_NONE;
}

/* leave(): as app.runtime.state.node.PythonPlaces. */
static PyObject *leave(Places *places, PyObject *Py_UNUSED(ignored))
{
    const Py_ssize_t count = places->count;
    PyObject **futures = leave_first(places, count);
    if (futures == NULL)
        return NULL;
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; i < count; i++)
        if (found != NULL)
            PyList_SET_ITEM(found, i, futures[i]);
        else
            Py_DECREF(futures[i]);
    PyMem_Free(futures);
    return found;
}

/* overdue(now_s): as app.runtime.state.node.PythonPlaces. */
static PyObject *overdue(Places *places, PyObject *value)
{
    const double now_s = PyFloat_AsDouble(value);
    Place *late = PyErr_Occurred() ? NULL : PyMem_Malloc((size_t)(places->count + 1) * sizeof(Place));
    if (late == NULL)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    Py_ssize_t lates = 0, left = 0;
    double next_s = Py_HUGE_VAL;
    for (Py_ssize_t i = 0; i < places->count; i++) {
        const Place place = places->places[places->first + i];
        if (place.ends_s <= now_s) {
            late[lates++] = place;
            continue;
        }
        places->places[left++] = place; /* never behind the one that is read */
        next_s = place.ends_s < next_s ? place.ends_s : next_s;
    }
    places->first = 0;
    places->count = left;
    places->came_s = -Py_HUGE_VAL;
    places->looks_at_s = Py_HUGE_VAL;
    int is_whole = next_s == Py_HUGE_VAL || look_at(places, next_s);
    PyObject *found = is_whole ? PyList_New(lates) : NULL;
    for (Py_ssize_t i = 0; i < lates; i++) {
        if (found != NULL && !set_item(found, i, Py_BuildValue("(LdO)", late[i].lsn, late[i].timeout_s, late[i].future)))
            Py_CLEAR(found);
        Py_DECREF(late[i].future);
    }
    PyMem_Free(late);
    return found;
}

/* --- the type ----------------------------------------------------------------------------------------------------- */

static int places_traverse(Places *places, visitproc visit, void *arg)
{
    Py_VISIT(places->on_wanted);
    Py_VISIT(places->failure);
    Py_VISIT(places->create_future);
    Py_VISIT(places->time);
    for (Py_ssize_t i = 0; i < places->count; i++)
        Py_VISIT(places->places[places->first + i].future);
    return 0;
}

static int places_clear(Places *places)
{
    Py_CLEAR(places->on_wanted);
    Py_CLEAR(places->failure);
    Py_CLEAR(places->create_future);
    Py_CLEAR(places->time);
    while (places->count > 0)
        Py_DECREF(places->places[places->first + --places->count].future);
    return 0;
}

static void places_dealloc(Places *places)
{
    PyTypeObject *type = Py_TYPE(places);
    PyObject_GC_UnTrack(places);
    places_clear(places);
    PyMem_Free(places->places);
    type->tp_free((PyObject *)places);
}

static PyObject *places_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords))
{
    Places *places = (Places *)type->tp_alloc(type, 0);
    if (places != NULL) {
        places->looks_at_s = Py_HUGE_VAL;
        places->came_s = -Py_HUGE_VAL;
    }
    return (PyObject *)places;
}

static int places_init(Places *places, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    long long lsn;
    if (!PyArg_ParseTuple(args, "L", &lsn))
        return -1;
    places->lsn = places->wanted_lsn = lsn;
    return 0;
}

static PyMethodDef places_methods[] = {
    METHOD(reached, reached, METH_FASTCALL),
    METHOD(want, want, METH_O),
    METHOD(advance, advance, METH_O),
    METHOD(leave, leave, METH_NOARGS),
    METHOD(overdue, overdue, METH_O),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef places_members[] = {
    {"lsn", T_LONGLONG, offsetof(Places, lsn), READONLY, NULL},
    {"wanted_lsn", T_LONGLONG, offsetof(Places, wanted_lsn), READONLY, NULL},
    {"looks_at_s", T_DOUBLE, offsetof(Places, looks_at_s), READONLY, NULL},
    {"on_wanted", T_OBJECT, offsetof(Places, on_wanted), 0, NULL},
    {"failure", T_OBJECT, offsetof(Places, failure), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject places_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "app.runtime.state._native.Places",
    .tp_doc = "Who waits for a position.",
    .tp_basicsize = sizeof(Places),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = places_new,
    .tp_init = (initproc)places_init,
    .tp_dealloc = (destructor)places_dealloc,
    .tp_traverse = (traverseproc)places_traverse,
    .tp_clear = (inquiry)places_clear,
    .tp_methods = places_methods,
    .tp_members = places_members,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "app.runtime.state._native",
    .m_doc = "Who waits for a position, in C.",
    .m_size = -1,
};

/* What asyncio has under this name. */
static PyObject *of_asyncio(const char *name)
{
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    PyObject *found = asyncio == NULL ? NULL : PyObject_GetAttrString(asyncio, name);
    Py_XDECREF(asyncio);
    return found;
}

PyMODINIT_FUNC PyInit__native(void)
{
    if ((get_running_loop = of_asyncio("get_running_loop")) == NULL
        || (invalid_state_error = of_asyncio("InvalidStateError")) == NULL
        || (name_create_future = PyUnicode_InternFromString("create_future")) == NULL
        || (name_time = PyUnicode_InternFromString("time")) == NULL
        || (name_set_result = PyUnicode_InternFromString("set_result")) == NULL
        || (name_set_exception = PyUnicode_InternFromString("set_exception")) == NULL
        || (name_look_at = PyUnicode_InternFromString("look_at")) == NULL || PyType_Ready(&places_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddObjectRef(module, "Places", (PyObject *)&places_type) < 0)
        Py_CLEAR(module);
    return module;
}
