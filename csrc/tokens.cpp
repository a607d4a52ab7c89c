#include "tokens.h"

#include <nanobind/nanobind.h>

#include <cstring>
#include <string>

namespace lmkv {
namespace {

[[noreturn]] void refuse(std::size_t position, const std::string& why) {
    throw nanobind::value_error(("token " + std::to_string(position) + " " + why).c_str());
}

[[noreturn]] void out_of_range(std::size_t position) {
    refuse(position, "is outside [0, 2**32)");
}

// The value of an exact int when it is small enough to be read without a call; -1 otherwise.
inline long long quick_value(PyObject* item) {
    if (!PyLong_CheckExact(item)) return -1;
#if defined(Py_LIMITED_API)
    return -1;
#elif PY_VERSION_HEX >= 0x030C0000
    auto* number = reinterpret_cast<PyLongObject*>(item);
    return PyUnstable_Long_IsCompact(number) ? PyUnstable_Long_CompactValue(number) : -1;
#else
    const auto size = Py_SIZE(item);
    if (size == 1) return reinterpret_cast<PyLongObject*>(item)->ob_digit[0];
    return size == 0 ? 0 : -1;
#endif
}

std::uint32_t slow_value(PyObject* item, std::size_t position) {
    if (PyBool_Check(item)) refuse(position, "is a bool");
    nanobind::object number = nanobind::steal(PyNumber_Index(item));
    if (!number.is_valid()) {
        PyErr_Clear();
        refuse(position,
               std::string("is not an integer but ") +
                   nanobind::type_name(reinterpret_cast<PyObject*>(Py_TYPE(item))).c_str());
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow || value < 0 || value > 0xFFFFFFFFLL) out_of_range(position);
    return static_cast<std::uint32_t>(value);
}

template <typename T>
void convert(const char* data, std::ptrdiff_t stride, std::size_t n, std::uint32_t* out) {
    for (std::size_t i = 0; i < n; ++i, data += stride) {
        T value;
        std::memcpy(&value, data, sizeof value);
        if constexpr (std::is_signed_v<T>)
            if (value < 0) out_of_range(i);
        if constexpr (sizeof(T) > 4)
            if (static_cast<std::uint64_t>(value) > 0xFFFFFFFF) out_of_range(i);
        out[i] = static_cast<std::uint32_t>(value);
    }
}

}  // namespace

void tokens_from_items(PyObject* sequence, std::size_t n, std::uint32_t* out) {
    const bool is_list = PyList_Check(sequence);
    for (std::size_t i = 0; i < n; ++i) {
        const auto at = static_cast<Py_ssize_t>(i);
#if defined(Py_LIMITED_API)
        PyObject* item = is_list ? PyList_GetItem(sequence, at) : PyTuple_GetItem(sequence, at);
        if (!item) throw nanobind::python_error();
#else
        PyObject* item = is_list ? PyList_GET_ITEM(sequence, at) : PyTuple_GET_ITEM(sequence, at);
#endif
        const long long quick = quick_value(item);
        if (quick >= 0) {
            if (quick > 0xFFFFFFFFLL) out_of_range(i);
            out[i] = static_cast<std::uint32_t>(quick);
            continue;
        }
        // An __index__ written in Python may change the list under us.
        const nanobind::object held = nanobind::borrow(item);
        out[i] = slow_value(item, i);
        if (is_list && PyList_Size(sequence) != static_cast<Py_ssize_t>(n))
            refuse(i, "changed the list it is in");
    }
}

bool tokens_from_buffer(const char* format, const char* data, std::ptrdiff_t stride, std::size_t n,
                        std::uint32_t* out) {
    const bool standard = *format == '<' || *format == '=';  // fixed sizes: 'l' has 4 bytes
    if (standard || *format == '@') ++format;
    if (*format == '\0' || format[1] != '\0') return false;
    switch (*format) {
        case 'b':
            convert<std::int8_t>(data, stride, n, out);
            return true;
        case 'B':
            convert<std::uint8_t>(data, stride, n, out);
            return true;
        case 'h':
            convert<std::int16_t>(data, stride, n, out);
            return true;
        case 'H':
            convert<std::uint16_t>(data, stride, n, out);
            return true;
        case 'i':
            convert<std::int32_t>(data, stride, n, out);
            return true;
        case 'I':
            convert<std::uint32_t>(data, stride, n, out);
            return true;
        case 'l':
            if (standard)
                convert<std::int32_t>(data, stride, n, out);
            else
                convert<long>(data, stride, n, out);
            return true;
        case 'L':
            if (standard)
                convert<std::uint32_t>(data, stride, n, out);
            else
                convert<unsigned long>(data, stride, n, out);
            return true;
        case 'q':
        case 'n':
            convert<std::int64_t>(data, stride, n, out);
            return true;
        case 'Q':
        case 'N':
            convert<std::uint64_t>(data, stride, n, out);
            return true;
        default:
            return false;
    }
}

}  // namespace lmkv
