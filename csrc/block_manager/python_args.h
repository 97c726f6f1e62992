// Python arguments to C++ values, with errors that name the argument, what was expected and what
// came. Converting may run Python code (__index__), so it is all done before the manager is read.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "block_manager.h"
#include "errors.h"

namespace paged_attn {

namespace py = pybind11;

// str(value). NOTE: py::str of a subclass of py::object is ambiguous in pybind11 2.12.
inline std::string text(py::handle value) { return py::str(value); }

inline std::string type_name(py::handle value) {
  return text(py::type::handle_of(value).attr("__name__"));
}

[[noreturn]] inline void throw_type(const char* where, const std::string& argument,
                                    const std::string& expected, py::handle value) {
  throw py::type_error(std::string(where) + ": " + argument + " must be " + expected + ", got " +
                       type_name(value));
}

inline int64_t to_int64(const char* where, const char* argument, py::handle value) {
  py::object integer;
  if (PyLong_Check(value.ptr())) {
    integer = py::reinterpret_borrow<py::object>(value);
  } else {
    integer = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!integer) {
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
      PyErr_Clear();
      throw_type(where, argument, "an int", value);
    }
  }
  int overflow = 0;
  const int64_t result = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
  if (overflow != 0) {
    // The number itself may be too long for Python to print.
    throw_invalid(where, argument, "an int64",
                  (overflow < 0 ? "a negative int of " : "an int of ") +
                      text(integer.attr("bit_length")()) + " bits");
  }
  return result;
}

inline std::optional<int64_t> to_optional_int64(const char* where, const char* argument,
                                                py::handle value) {
  if (value.is_none()) return std::nullopt;
  return to_int64(where, argument, value);
}

// Whether `value` stands for several ints rather than one. Arrays and tensors without dimensions
// have no length and count as one.
inline bool is_sequence(py::handle value) {
  if (PyLong_Check(value.ptr()) || !PySequence_Check(value.ptr())) return false;
  if (PySequence_Size(value.ptr()) >= 0) return true;
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
  PyErr_Clear();
  return false;
}

inline std::vector<int64_t> to_int64s(const char* where, const char* argument, py::handle value) {
  if (!is_sequence(value)) throw_type(where, argument, "a sequence of ints", value);
  if (py::isinstance<py::array>(value)) {
    const auto array = py::reinterpret_borrow<py::array>(value);
    const char kind = array.dtype().kind();
    if (array.ndim() != 1 || (kind != 'i' && kind != 'u')) {
      throw_invalid(where, argument, "a one-dimensional array of ints",
                    "an array of dtype " + text(array.dtype()) + " and " +
                        std::to_string(array.ndim()) + " dimensions");
    }
    if (array.dtype().is(py::dtype::of<int64_t>())) {
      const auto view = py::reinterpret_borrow<py::array_t<int64_t>>(array).unchecked<1>();
      std::vector<int64_t> result(static_cast<size_t>(view.shape(0)));
      for (size_t i = 0; i < result.size(); ++i) result[i] = view(static_cast<py::ssize_t>(i));
      return result;
    }
  }
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(value.ptr(), argument));
  if (!items) throw py::error_already_set();
  std::vector<int64_t> result;
  result.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
  // The size is read anew each time: an item's __index__ may shorten the list.
  for (py::ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(items.ptr(), i));
    result.push_back(to_int64(where, argument, item));
  }
  return result;
}

inline PerSequence to_per_sequence(const char* where, const char* argument, py::handle value) {
  PerSequence result;
  if (is_sequence(value)) {
    result.each = to_int64s(where, argument, value);
  } else {
    result.common = to_int64(where, argument, value);
  }
  return result;
}

}  // namespace paged_attn
