#include "tokens.h"

#include <nanobind/nanobind.h>

#include <cstring>
#include <string>

namespace lmkv {
namespace {

[[noreturn]] void refuse(std::size_t position, const std::string& why) {
    throw nanobind::value_error(("token " + std::to_string(position) + " " + why).c_str());
}

std::uint32_t in_range(long long value, std::size_t position) {
    if (value < 0 || value > 0xFFFFFFFFLL) refuse(position, "is outside [0, 2**32)");
    return static_cast<std::uint32_t>(value);
}

// The value of a small exact int, read without a call where the interpreter lets us; otherwise -1.
long long quick_value(PyObject* item) {
#if !defined(Py_LIMITED_API) && PY_VERSION_HEX < 0x030C0000
    if (PyLong_CheckExact(item)) {
        if (Py_SIZE(item) == 1) return reinterpret_cast<PyLongObject*>(item)->ob_digit[0];
        if (Py_SIZE(item) == 0) return 0;
    }
#else
    int overflow = 0;
    if (PyLong_CheckExact(item)) {
        const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (!overflow) return value;
    }
#endif
    return -1;
}

// The item at i (borrowed), null when the sequence has shrunk meanwhile.
PyObject* item_at(PyObject* sequence, bool is_list, Py_ssize_t i) {
#if defined(Py_LIMITED_API)
    PyObject* const item = is_list ? PyList_GetItem(sequence, i) : PyTuple_GetItem(sequence, i);
    if (!item) PyErr_Clear();
    return item;
#else
    if (i >= Py_SIZE(sequence)) return nullptr;
    return is_list ? PyList_GET_ITEM(sequence, i) : PyTuple_GET_ITEM(sequence, i);
#endif
}

std::uint32_t slow_value(PyObject* item, std::size_t position) {
    if (PyBool_Check(item)) refuse(position, "is a bool");
    const nanobind::object number = nanobind::steal(PyNumber_Index(item));
    if (!number.is_valid()) {
        PyErr_Clear();
        refuse(position, "is not an integer");
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    return in_range(overflow ? -1 : value, position);
}

template <typename T>
void convert(const char* data, std::ptrdiff_t stride, std::size_t n, std::uint32_t* out) {
    for (std::size_t i = 0; i < n; ++i, data += stride) {
        T value;
        std::memcpy(&value, data, sizeof value);
        if constexpr (sizeof(T) < 4 && std::is_unsigned_v<T>)
            out[i] = value;
        else
            out[i] = in_range(static_cast<long long>(value), i);
    }
}

}  // namespace

void tokens_from_items(PyObject* sequence, std::size_t n, std::uint32_t* out) {
    const bool is_list = PyList_Check(sequence);
    for (std::size_t i = 0; i < n; ++i) {
        PyObject* const item = item_at(sequence, is_list, static_cast<Py_ssize_t>(i));
        if (!item) refuse(i, "is gone: the list changed while it was read");
        const long long quick = quick_value(item);
        if (quick >= 0) {
            out[i] = in_range(quick, i);
        } else {
            const nanobind::object held = nanobind::borrow(item);  // __index__ may change the list
            out[i] = slow_value(item, i);
        }
    }
}

void tokens_from_array(const char* data, bool is_signed, std::size_t itemsize, std::ptrdiff_t stride, std::size_t n,
                       std::uint32_t* out) {
    const auto as = [&](auto item) {
        using Signed = decltype(item);
        if (is_signed)
            convert<Signed>(data, stride, n, out);
        else
            convert<std::make_unsigned_t<Signed>>(data, stride, n, out);
    };
    switch (itemsize) {
        case 1: return as(std::int8_t{});
        case 2: return as(std::int16_t{});
        case 4: return as(std::int32_t{});
        default: return as(std::int64_t{});
    }
}

}  // namespace lmkv
