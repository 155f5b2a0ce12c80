/* The most frequent loads of a frame, of attributes of its arguments: `self.scale`, `self.layer(x)`.
 *
 * What is not as simple as that is left to Python, which notes the same (frames/frame.py).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Of onelaunch.frames: see `native_note` there. */
static PyObject *kinds;   /* dict: class -> its facts, as far as they are known */
static PyObject *files;   /* set: files whose functions are inert */
static PyObject *modules; /* set: modules whose functions may not be inert */
static PyObject *telling; /* tuple: attributes by which a callee may not be inert */
static PyObject *ref_name, *names_name;

enum { PLAIN, HELD, MODULE }; /* the first of the facts about a class */

/* Each of these returns 1, or 0 where Python is to decide; -1, an exception. */

static int raise_uses(PyObject *known, PyObject *uses, PyObject *inside, PyObject *others)
{
    PyObject *name, *use;
    Py_ssize_t at = 0;
    while (PyDict_Next(uses, &at, &name, &use)) {
        int of_class = PySet_Contains(others, name), own = PyDict_Contains(inside, name);
        if (of_class < 0 || own < 0)
            return -1;
        if (of_class == own) /* its class has another part of the attributes than noted before */
            return 0;
        PyObject *before = PyDict_GetItemWithError(known, name);
        if (before == use || (!before && PyErr_Occurred()))
            continue;
        if (!before || PyLong_AsLong(use) > PyLong_AsLong(before))
            PyDict_SetItem(known, name, use);
    }
    return PyErr_Occurred() ? -1 : 1;
}

/* Return the reads of an object, a new reference. */
static PyObject *owner_of(PyObject *owners, PyObject *make, PyObject *value)
{
    PyObject *id = PyLong_FromVoidPtr(value);
    PyObject *found = id ? PyDict_GetItemWithError(owners, id) : NULL;
    Py_XDECREF(id);
    PyObject *ref = found ? PyObject_GetAttr(found, ref_name) : NULL;
    PyObject *at = ref ? PyObject_CallNoArgs(ref) : NULL;
    Py_XDECREF(ref);
    Py_XDECREF(at);
    if (PyErr_Occurred())
        return NULL;
    return at == value ? Py_NewRef(found) : PyObject_CallOneArg(make, value);
}

/* facts: (attribute -> use, attributes that its class has, whether this is all there is to it) */
static int note_attributes(PyObject *owners, PyObject *make, PyObject *value, PyObject *facts)
{
    PyObject *uses = PyTuple_GET_ITEM(facts, 0);
    if (!PyDict_GET_SIZE(uses))
        return 1;
    if (PyTuple_GET_ITEM(facts, 2) != Py_True)
        return 0;
    PyObject *owner = owner_of(owners, make, value);
    PyObject *known = owner ? PyObject_GetAttr(owner, names_name) : NULL;
    PyObject *inside = known ? PyObject_GenericGetDict(value, NULL) : NULL;
    int done = inside ? raise_uses(known, uses, inside, PyTuple_GET_ITEM(facts, 1)) : -1;
    Py_XDECREF(owner);
    Py_XDECREF(known);
    Py_XDECREF(inside);
    return done;
}

/* Return the facts about a value's class, if `__dict__` and the class are all there is to its
 * attributes; borrowed. */
static PyObject *plain(PyObject *value)
{
    PyObject *facts = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(value));
    return facts && PyTuple_GET_ITEM(facts, PLAIN) == Py_True ? facts : NULL;
}

static int is_of_others(PyObject *module)
{
    int found = module ? PySet_Contains(modules, module) : 0;
    return found < 0 ? -1 : !found;
}

static int is_inert_object(PyObject *function)
{
    PyObject *facts = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(function));
    PyObject *module = facts ? PyTuple_GET_ITEM(facts, MODULE) : Py_None;
    if (PyErr_Occurred() || module == Py_None)
        return PyErr_Occurred() ? -1 : 0;
    if (PyUnicode_GET_LENGTH(module) == 0) /* a number, a text */
        return 1;
    PyObject *inside = plain(function) ? PyObject_GenericGetDict(function, NULL) : NULL;
    int found = inside ? is_of_others(module) : PyErr_Occurred() ? -1 : 0;
    for (Py_ssize_t i = 0; found == 1 && i < PyTuple_GET_SIZE(telling); i++) {
        int told = PyDict_Contains(inside, PyTuple_GET_ITEM(telling, i));
        found = told < 0 ? -1 : !told;
    }
    Py_XDECREF(inside);
    return found;
}

static int is_inert(PyObject *function)
{
    if (PyMethod_Check(function) && PyFunction_Check(PyMethod_GET_FUNCTION(function))) {
        PyFunctionObject *inner = (PyFunctionObject *)PyMethod_GET_FUNCTION(function);
        int bare = !inner->func_dict || !PyDict_GET_SIZE(inner->func_dict);
        return bare ? is_of_others(inner->func_module) : 0;
    }
    if (PyFunction_Check(function)) {
        int other = is_of_others(PyFunction_GET_MODULE(function));
        PyCodeObject *code = (PyCodeObject *)PyFunction_GET_CODE(function);
        return other == 1 ? PySet_Contains(files, code->co_filename) : other;
    }
    if (PyCFunction_CheckExact(function)) {
        PyObject *of = PyCFunction_GET_SELF(function);
        int free = !of || PyModule_Check(of) || PyType_Check(of);
        return free ? is_of_others(((PyCFunctionObject *)function)->m_module) : 0;
    }
    return is_inert_object(function);
}

static int calls_inert(PyObject *value, PyObject *name)
{
    PyObject *facts = plain(value);
    PyObject *inside = facts ? PyObject_GenericGetDict(value, NULL) : NULL;
    if (!inside)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *found = PyDict_GetItemWithError(inside, name);
    PyObject *held = PyTuple_GET_ITEM(facts, HELD);
    for (Py_ssize_t i = 0; !found && i < PyTuple_GET_SIZE(held) && !PyErr_Occurred(); i++) {
        PyObject *entries = PyDict_GetItemWithError(inside, PyTuple_GET_ITEM(held, i));
        found = entries && PyDict_Check(entries) ? PyDict_GetItemWithError(entries, name) : NULL;
    }
    int inert = PyErr_Occurred() ? -1 : found ? is_inert(found) : 1;
    if (!found && inert > 0) {
        found = _PyType_Lookup(Py_TYPE(value), name);
        inert = !found || found == Py_None ? 1 : PyFunction_Check(found) ? is_inert(found) : 0;
    }
    Py_DECREF(inside);
    return inert;
}

static int results_inert(PyObject *results, PyObject *offset)
{
    PyObject *found = PyDict_GetItemWithError(results, offset);
    int inert = PyErr_Occurred() ? -1 : 1;
    for (Py_ssize_t i = 0; found && inert == 1 && i < PyList_GET_SIZE(found); i++)
        inert = is_inert(PyList_GET_ITEM(found, i));
    return inert;
}

static PyObject *note(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *values, *arguments, *calls, *results, *owners, *make, *name, *known;
    Py_ssize_t at = 0;
    int done = 1;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O", &PyDict_Type, &values, &PyDict_Type, &arguments,
                          &PyTuple_Type, &calls, &PyDict_Type, &results, &PyDict_Type, &owners,
                          &make))
        return NULL;
    while (done == 1 && PyDict_Next(arguments, &at, &name, &known)) {
        PyObject *value = PyDict_GetItemWithError(values, name);
        PyObject *facts = value ? PyDict_GetItemWithError(known, (PyObject *)Py_TYPE(value)) : NULL;
        if (value)
            done = facts ? note_attributes(owners, make, value, facts) : 0;
        if (PyErr_Occurred())
            return NULL;
    }
    for (Py_ssize_t i = 0; done == 1 && i < PyTuple_GET_SIZE(calls); i++) {
        PyObject *call = PyTuple_GET_ITEM(calls, i), *attribute = PyTuple_GET_ITEM(call, 1);
        PyObject *value = PyDict_GetItemWithError(values, PyTuple_GET_ITEM(call, 0));
        done = !!value;
        if (value && PyDict_GET_SIZE(results))
            done = results_inert(results, PyTuple_GET_ITEM(call, 2));
        if (done == 1)
            done = attribute == Py_None ? is_inert(value) : calls_inert(value, attribute);
        if (PyErr_Occurred())
            return NULL;
    }
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *know(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *to[4];
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyDict_Type, &to[0], &PySet_Type, &to[1],
                          &PyFrozenSet_Type, &to[2], &PyTuple_Type, &to[3]))
        return NULL;
    Py_XSETREF(kinds, Py_NewRef(to[0]));
    Py_XSETREF(files, Py_NewRef(to[1]));
    Py_XSETREF(modules, Py_NewRef(to[2]));
    Py_XSETREF(telling, Py_NewRef(to[3]));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"know", know, METH_VARARGS, "Take what is known of classes and files."},
    {"note", note, METH_VARARGS, "Note a frame's simple loads; return whether all were simple."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "onelaunch_frames", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_onelaunch_frames(void)
{
    ref_name = PyUnicode_InternFromString("ref");
    names_name = PyUnicode_InternFromString("names");
    return ref_name && names_name ? PyModule_Create(&definition) : NULL;
}
