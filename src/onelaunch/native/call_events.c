/* The filter of the interpreter's profiling events.
 *
 * A profiling function in Python costs a microsecond for each call in Python or C of whatever runs,
 * and taking it off and on again more than that (since Python 3.12 all code is instrumented anew).
 * This one stays on, is paused where onelaunch itself works, and calls Python only for events that
 * matter.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static _Thread_local int paused; /* 1 while this thread's events are not to be seen */

typedef struct {
    PyObject_HEAD
    PyObject *frames;  /* called when a function in Python begins and returns; or None */
    PyObject *codes;   /* dict: id of code -> which of its events matter; all where it is not in */
    PyObject *leaves;  /* set: types of results of unseen code that matter by attributes alone */
    PyObject *methods; /* called for a call of a method in C of `owners`; or None */
    PyObject *owners;  /* tuple of types */
    PyObject *gate;    /* list: nothing is reported while it is empty; or None */
    char over;
} Hook;

/* `call_events.Matters` */
enum { EVERY, RESULTS, USES, RETURNS };

static PyObject *called, *returned, *called_in_c; /* the names of events */

static int report(PyObject *to, PyFrameObject *frame, PyObject *event, PyObject *arg)
{
    PyObject *result;
    Py_INCREF(to); /* `end` drops it */
    result = PyObject_CallFunctionObjArgs(to, frame, event, arg ? arg : Py_None, NULL);
    Py_DECREF(to);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Each of these returns -1 for an exception. */

static long which_matter(Hook *self, PyFrameObject *frame)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *id = PyLong_FromVoidPtr(code);
    PyObject *found = id ? PyDict_GetItemWithError(self->codes, id) : NULL;
    Py_XDECREF(id);
    Py_DECREF(code);
    return found ? PyLong_AsLong(found) : PyErr_Occurred() ? -1 : EVERY;
}

static int is_unseen(long matter)
{
    return matter < 0 ? -1 : matter == RESULTS || matter == USES;
}

static int is_leaf(Hook *self, PyObject *result)
{
    int found = result ? PySet_Contains(self->leaves, (PyObject *)Py_TYPE(result)) : 1;
    if (found <= 0 || !result || !Py_TYPE(result)->tp_dictoffset)
        return found;
    PyObject *attributes = PyObject_GenericGetDict(result, NULL);
    found = attributes && PyDict_Check(attributes) && !PyDict_GET_SIZE(attributes);
    Py_XDECREF(attributes);
    PyErr_Clear();
    return found;
}

static int is_of_unseen(Hook *self, PyFrameObject *frame)
{
    PyFrameObject *caller = PyFrame_GetBack(frame);
    int found = caller ? is_unseen(which_matter(self, caller)) : 1;
    Py_XDECREF(caller);
    return found;
}

static int is_skipped(Hook *self, PyFrameObject *frame, int what, PyObject *result)
{
    long matter = which_matter(self, frame);
    int found = is_unseen(matter);
    if (found <= 0)
        return found < 0 ? -1 : matter == RETURNS && what == PyTrace_CALL;
    found = what == PyTrace_RETURN ? is_leaf(self, result) : matter == RESULTS;
    return found ? found : is_of_unseen(self, frame);
}

static int is_owned(Hook *self, PyObject *function)
{
    PyObject *owner = PyCFunction_Check(function) ? PyCFunction_GET_SELF(function) : NULL;
    for (Py_ssize_t i = 0; owner && i < PyTuple_GET_SIZE(self->owners); i++)
        if (PyObject_TypeCheck(owner, (PyTypeObject *)PyTuple_GET_ITEM(self->owners, i)))
            return 1;
    return 0;
}

static int notice(PyObject *hook, PyFrameObject *frame, int what, PyObject *arg)
{
    Hook *self = (Hook *)hook;
    if (paused)
        return 0;
    if (self->over) { /* another thread's, which has outlived the run */
        PyEval_SetProfile(NULL, NULL);
        return 0;
    }
    if (self->gate != Py_None && !PyList_GET_SIZE(self->gate))
        return 0;
    if (what == PyTrace_C_CALL && self->methods != Py_None)
        return is_owned(self, arg) ? report(self->methods, frame, called_in_c, arg) : 0;
    if (self->frames == Py_None || (what != PyTrace_CALL && what != PyTrace_RETURN))
        return 0;
    int skipped = is_skipped(self, frame, what, arg);
    if (skipped)
        return skipped < 0 ? -1 : 0;
    return report(self->frames, frame, what == PyTrace_CALL ? called : returned, arg);
}

static PyObject *begin(PyObject *self, PyObject *Py_UNUSED(none))
{
    PyEval_SetProfile(notice, self);
    Py_RETURN_NONE;
}

static PyObject *end(PyObject *hook, PyObject *Py_UNUSED(none))
{
    Hook *self = (Hook *)hook;
    self->over = 1;
    /* Another thread may keep this until its next event, and must keep nothing of the run. */
    Py_XSETREF(self->frames, Py_NewRef(Py_None));
    Py_XSETREF(self->methods, Py_NewRef(Py_None));
    Py_RETURN_NONE;
}

static int init(PyObject *hook, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"frames", "codes", "leaves", "methods", "owners", "gate", NULL};
    Hook *self = (Hook *)hook;
    PyObject *frames, *codes, *leaves, *methods, *owners, *gate;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!OO!O", names, &frames, &PyDict_Type,
                                     &codes, &PySet_Type, &leaves, &methods, &PyTuple_Type,
                                     &owners, &gate))
        return -1;
    if (gate != Py_None && !PyList_Check(gate)) {
        PyErr_SetString(PyExc_TypeError, "the gate is a list");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(owners); i++)
        if (!PyType_Check(PyTuple_GET_ITEM(owners, i))) {
            PyErr_SetString(PyExc_TypeError, "owners are types");
            return -1;
        }
    Py_XSETREF(self->frames, Py_NewRef(frames));
    Py_XSETREF(self->codes, Py_NewRef(codes));
    Py_XSETREF(self->leaves, Py_NewRef(leaves));
    Py_XSETREF(self->methods, Py_NewRef(methods));
    Py_XSETREF(self->owners, Py_NewRef(owners));
    Py_XSETREF(self->gate, Py_NewRef(gate));
    return 0;
}

#define EACH_PART(act)                                                                             \
    act(self->frames);                                                                             \
    act(self->codes);                                                                              \
    act(self->leaves);                                                                             \
    act(self->methods);                                                                            \
    act(self->owners);                                                                             \
    act(self->gate)

static int traverse(PyObject *hook, visitproc visit, void *arg)
{
    Hook *self = (Hook *)hook;
    Py_VISIT(Py_TYPE(hook));
    EACH_PART(Py_VISIT);
    return 0;
}

static void dealloc(PyObject *hook)
{
    Hook *self = (Hook *)hook;
    PyTypeObject *type = Py_TYPE(hook);
    PyObject_GC_UnTrack(hook);
    EACH_PART(Py_XDECREF);
    type->tp_free(hook);
    Py_DECREF(type);
}

static PyMethodDef hook_methods[] = {
    {"begin", begin, METH_NOARGS, "Become the profiling function of this thread."},
    {"end", end, METH_NOARGS, "Leave every other thread at its next event."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_doc, "A profiling function that calls Python for the events that matter."},
    {Py_tp_init, init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_methods, hook_methods},
    {Py_tp_traverse, traverse},
    {Py_tp_dealloc, dealloc},
    {0, NULL},
};

static PyType_Spec hook_spec = {
    .name = "onelaunch_call_events.Hook",
    .basicsize = sizeof(Hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = hook_slots,
};

static PyObject *pause_thread(PyObject *Py_UNUSED(module), PyObject *pauses)
{
    int before = paused, now = PyObject_IsTrue(pauses);
    if (now < 0)
        return NULL;
    if (now && !before) /* the interpreter makes no events, which cost more than what they skip */
        PyThreadState_EnterTracing(PyThreadState_Get());
    else if (before && !now)
        PyThreadState_LeaveTracing(PyThreadState_Get());
    paused = now;
    return PyBool_FromLong(before);
}

static PyObject *identity(PyObject *Py_UNUSED(module), PyObject *object)
{
    return PyLong_FromVoidPtr(object);
}

static PyMethodDef methods[] = {
    {"pause", pause_thread, METH_O, "Set whether this thread is paused; return whether it was."},
    {"identity", identity, METH_O, "As `id`, without an audit event."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "onelaunch_call_events", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_onelaunch_call_events(void)
{
    called = PyUnicode_InternFromString("call");
    returned = PyUnicode_InternFromString("return");
    called_in_c = PyUnicode_InternFromString("c_call");
    PyObject *module = called && returned && called_in_c ? PyModule_Create(&definition) : NULL;
    PyObject *type = module ? PyType_FromSpec(&hook_spec) : NULL;
    if (!type || PyModule_AddObject(module, "Hook", type)) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
