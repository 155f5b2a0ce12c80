/* The most frequent loads of a frame, of attributes of its arguments: `self.scale`, `self.layer(x)`.
 *
 * What is not as simple as that is left to Python, which notes the same (frames/frame.py).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Of onelaunch.frames: see `native_frames` there. */
static PyObject *kinds;   /* dict: class -> its facts, as far as they are known */
static PyObject *files;   /* set: files whose functions are inert */
static PyObject *modules; /* set: modules whose functions may not be inert */
static PyObject *item_methods; /* set: names of methods of dicts that read items */
static PyObject *ref_name, *names_name, *module_name, *class_name;

enum { GROWS = 1 }; /* of the uses */
enum { PLAIN, USUAL, HELD, MODULE, NOTHING }; /* the first of the facts about a class */

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
        if (before && PyLong_AsLong(before) + PyLong_AsLong(use) == GROWS)
            return 0; /* another function stores what this one counts, or the other way round */
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

/* Return the facts about a value's class, if one of them is true; borrowed. */
static PyObject *facts_if(int fact, PyObject *value)
{
    PyObject *facts = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(value));
    return facts && PyTuple_GET_ITEM(facts, fact) == Py_True ? facts : NULL;
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
    PyObject *inside = facts_if(USUAL, function) ? PyObject_GenericGetDict(function, NULL) : NULL;
    if (!inside)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *own = PyDict_GetItemWithError(inside, module_name);
    int told = PyErr_Occurred() ? -1 : PyDict_Contains(inside, class_name);
    int found = told ? (told < 0 ? -1 : 0) : is_of_others(own ? own : module);
    Py_DECREF(inside);
    return found;
}

static int is_inert(PyObject *function)
{
    if (PyMethod_Check(function) && PyFunction_Check(PyMethod_GET_FUNCTION(function))) {
        PyFunctionObject *inner = (PyFunctionObject *)PyMethod_GET_FUNCTION(function);
        int told = inner->func_dict ? PyDict_Contains(inner->func_dict, class_name) : 0;
        return told ? (told < 0 ? -1 : 0) : is_of_others(inner->func_module);
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

/* Take a step from a value, which becomes one of its attributes; 2 if it has none to be followed. */
static int go_on(PyObject **value, PyObject *name)
{
    PyObject *facts = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(*value));
    int nothing = facts ? PySet_Contains(PyTuple_GET_ITEM(facts, NOTHING), name) : 0;
    if (nothing)
        return nothing < 0 ? -1 : 2;
    facts = facts_if(PLAIN, *value);
    PyObject *inside = facts ? PyObject_GenericGetDict(*value, NULL) : NULL;
    if (!inside)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *found = PyDict_GetItemWithError(inside, name);
    PyObject *held = PyTuple_GET_ITEM(facts, HELD);
    for (Py_ssize_t i = 0; !found && i < PyTuple_GET_SIZE(held) && !PyErr_Occurred(); i++) {
        PyObject *entries = PyDict_GetItemWithError(inside, PyTuple_GET_ITEM(held, i));
        found = entries && PyDict_Check(entries) ? PyDict_GetItemWithError(entries, name) : NULL;
    }
    int absent = 0;
    if (!found && !PyErr_Occurred()) {
        found = _PyType_Lookup(Py_TYPE(*value), name);
        absent = !found;
        if (found && !PyFunction_Check(found)) {
            PyObject *of = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(found));
            if (!of || PyTuple_GET_ITEM(of, MODULE) == Py_None) /* a property, say */
                found = NULL;
        }
    }
    if (found)
        Py_SETREF(*value, Py_NewRef(found));
    Py_DECREF(inside);
    return PyErr_Occurred() ? -1 : absent ? 2 : !!found;
}

/* Return whether code that was called there gave this value alone, or callees that are inert. */
static int gave(PyObject *results, PyObject *offset, PyObject *value, int callees)
{
    PyObject *found = PyDict_GetItemWithError(results, offset);
    int known = PyErr_Occurred() ? -1 : 1;
    for (Py_ssize_t i = 0; found && known == 1 && i < PyList_GET_SIZE(found); i++) {
        PyObject *result = PyList_GET_ITEM(found, i);
        known = result == value ? 1 : callees ? is_inert(result) : 0;
    }
    return known;
}

typedef struct {
    PyObject *values, *globals, *results, *owners, *make;
} Frame;

static int calls_dict(Frame *frame, PyObject *value, PyObject *name)
{
    int own = value == frame->globals || value == PyImport_GetModuleDict();
    if (own || !PyDict_CheckExact(value))
        return 0;
    int reads = PySet_Contains(item_methods, name);
    return reads < 0 ? -1 : !reads;
}

/* step: (variable or None, value if None, ((attribute, offset), ...), class -> facts or None) */
static int note_step(Frame *frame, PyObject *step)
{
    PyObject *name = PyTuple_GET_ITEM(step, 0), *path = PyTuple_GET_ITEM(step, 2);
    PyObject *known = PyTuple_GET_ITEM(step, 3), *value = PyTuple_GET_ITEM(step, 1);
    if (name != Py_None)
        value = PyDict_GetItemWithError(frame->values, name);
    if (!value)
        return PyErr_Occurred() ? -1 : 0;
    int done = 1;
    Py_INCREF(value);
    for (Py_ssize_t i = 0; done == 1 && i < PyTuple_GET_SIZE(path); i++) {
        PyObject *part = PyTuple_GET_ITEM(path, i), *attribute = PyTuple_GET_ITEM(part, 0);
        int callees = known == Py_None && i + 1 == PyTuple_GET_SIZE(path);
        done = callees ? calls_dict(frame, value, attribute) : 0;
        done = done ? (done < 0 ? -1 : 2) : go_on(&value, attribute);
        if (done > 0 && PyDict_GET_SIZE(frame->results)) {
            PyObject *at = PyTuple_GET_ITEM(part, 1), *end = done == 1 ? value : NULL;
            int alone = gave(frame->results, at, end, callees);
            done = alone < 1 ? alone : done;
        }
    }
    if (done == 1 && known != Py_None) {
        PyObject *facts = PyDict_GetItemWithError(known, (PyObject *)Py_TYPE(value));
        done = PyErr_Occurred() ? -1 : 0;
        if (facts)
            done = note_attributes(frame->owners, frame->make, value, facts);
    } else if (done == 1)
        done = is_inert(value);
    Py_DECREF(value);
    return done;
}

static PyObject *note(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *steps, *left;
    Frame frame;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O", &PyTuple_Type, &steps, &PyDict_Type, &frame.values,
                          &PyDict_Type, &frame.globals, &PyDict_Type, &frame.results, &PyDict_Type,
                          &frame.owners, &frame.make))
        return NULL;
    left = PyList_New(0);
    for (Py_ssize_t i = 0; left && i < PyTuple_GET_SIZE(steps); i++) {
        int done = note_step(&frame, PyTuple_GET_ITEM(steps, i));
        if (done < 0 || (!done && PyList_Append(left, PyTuple_GET_ITEM(steps, i))))
            Py_CLEAR(left);
    }
    return left;
}

/* checks: (names, a name, its value or `missing`) */
static PyObject *hold(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *checks, *missing;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &checks, &missing))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(checks); i++) {
        PyObject *check = PyTuple_GET_ITEM(checks, i);
        PyObject *names = PyTuple_GET_ITEM(check, 0);
        PyObject *found = PyDict_GetItemWithError(names, PyTuple_GET_ITEM(check, 1));
        if (PyErr_Occurred())
            return NULL;
        if ((found ? found : missing) != PyTuple_GET_ITEM(check, 2))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *know(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *to[4];
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyDict_Type, &to[0], &PySet_Type, &to[1],
                          &PyFrozenSet_Type, &to[2], &PyFrozenSet_Type, &to[3]))
        return NULL;
    Py_XSETREF(kinds, Py_NewRef(to[0]));
    Py_XSETREF(files, Py_NewRef(to[1]));
    Py_XSETREF(modules, Py_NewRef(to[2]));
    Py_XSETREF(item_methods, Py_NewRef(to[3]));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"hold", hold, METH_VARARGS, "Return whether names have the same values."},
    {"know", know, METH_VARARGS, "Take what is known of classes and files."},
    {"note", note, METH_VARARGS, "Note a frame's steps; return those that are left."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "onelaunch_frames", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_onelaunch_frames(void)
{
    ref_name = PyUnicode_InternFromString("ref");
    names_name = PyUnicode_InternFromString("names");
    module_name = PyUnicode_InternFromString("__module__");
    class_name = PyUnicode_InternFromString("__objclass__");
    return class_name && module_name ? PyModule_Create(&definition) : NULL;
}
