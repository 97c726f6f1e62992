// The four numpy arrays of a step: new ones, or the caller's after a thorough look.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "block_manager.h"
#include "python_args.h"

namespace paged_attn {

constexpr const char* kStepInputs = "paged_attn.BlockManager.step_inputs";
constexpr std::array<const char*, 4> kStepArrayNames = {
    "out[0] (block_tables)", "out[1] (context_lens)", "out[2] (slot_mapping)",
    "out[3] (cu_seqlens_q)"};

inline std::string shape_text(const py::array& array) { return text(array.attr("shape")); }

// Writable, aligned, C-contiguous, of this dtype and rank.
template <typename T>
void check_array(const char* name, const py::array& array, py::ssize_t ndim) {
  const py::dtype expected = py::dtype::of<T>();
  const auto fail = [&](const std::string& got) {
    throw_invalid(kStepInputs, name,
                  "a writable, aligned, C-contiguous array of " + text(expected) + " with " +
                      std::to_string(ndim) + " dimension" + (ndim == 1 ? "" : "s"),
                  got);
  };
  if (!array.dtype().is(expected) && !array.dtype().equal(expected)) {
    fail("dtype " + text(array.dtype()));
  }
  if (array.ndim() != ndim) fail("shape " + shape_text(array));
  if (!(array.flags() & py::array::c_style)) fail("an array that is not C-contiguous");
  if (!array.writeable()) fail("a read-only array");
  if (reinterpret_cast<uintptr_t>(array.data()) % alignof(T) != 0) fail("an unaligned array");
}

inline void check_no_overlap(const std::array<py::array, 4>& arrays) {
  for (size_t i = 0; i < arrays.size(); ++i) {
    for (size_t j = i + 1; j < arrays.size(); ++j) {
      const auto* a = static_cast<const char*>(arrays[i].data());
      const auto* b = static_cast<const char*>(arrays[j].data());
      if (a < b + arrays[j].nbytes() && b < a + arrays[i].nbytes()) {
        throw_invalid(kStepInputs, "out", "four arrays that do not overlap",
                      std::string(kStepArrayNames[i]) + " overlapping " + kStepArrayNames[j]);
      }
    }
  }
}

inline std::array<py::array, 4> caller_arrays(py::handle out) {
  if (!PyTuple_Check(out.ptr()) && !PyList_Check(out.ptr())) {
    throw_type(kStepInputs, "out", "a tuple or list of four numpy arrays", out);
  }
  const auto size = PySequence_Fast_GET_SIZE(out.ptr());
  if (size != 4) {
    throw_invalid(kStepInputs, "out", "a tuple or list of four numpy arrays",
                  std::to_string(size) + " items");
  }
  std::array<py::array, 4> arrays;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const py::handle item = PySequence_Fast_GET_ITEM(out.ptr(), static_cast<py::ssize_t>(i));
    if (!py::isinstance<py::array>(item)) {
      throw_type(kStepInputs, kStepArrayNames[i], "a numpy array", item);
    }
    arrays[i] = py::reinterpret_borrow<py::array>(item);
  }
  return arrays;
}

inline void check_caller_arrays(const std::array<py::array, 4>& arrays, const StepPlan& plan,
                                std::optional<int64_t> width) {
  check_array<int32_t>(kStepArrayNames[0], arrays[0], 2);
  check_array<int32_t>(kStepArrayNames[1], arrays[1], 1);
  check_array<int64_t>(kStepArrayNames[2], arrays[2], 1);
  check_array<int32_t>(kStepArrayNames[3], arrays[3], 1);
  const auto expect = [&](size_t i, bool ok, const std::string& shape) {
    if (!ok) {
      throw_invalid(kStepInputs, kStepArrayNames[i], "of shape " + shape, shape_text(arrays[i]));
    }
  };
  const std::string rows = std::to_string(plan.num_rows);
  const std::string columns =
      width ? std::to_string(*width) : "at least " + std::to_string(plan.min_width);
  const bool wide_enough =
      width ? arrays[0].shape(1) == *width : arrays[0].shape(1) >= plan.min_width;
  expect(0, arrays[0].shape(0) == plan.num_rows && wide_enough, "(" + rows + ", " + columns + ")");
  expect(1, arrays[1].shape(0) == plan.num_rows, "(" + rows + ",)");
  expect(2, arrays[2].shape(0) >= plan.num_query_tokens,
         "(at least " + std::to_string(plan.num_query_tokens) + ",)");
  expect(3, arrays[3].shape(0) == plan.num_rows + 1,
         "(" + std::to_string(plan.num_rows + 1) + ",)");
  check_no_overlap(arrays);
}

inline std::array<py::array, 4> new_arrays(const StepPlan& plan, int64_t width) {
  return {py::array_t<int32_t>({plan.num_rows, width}), py::array_t<int32_t>(plan.num_rows),
          py::array_t<int64_t>(plan.num_query_tokens), py::array_t<int32_t>(plan.num_rows + 1)};
}

}  // namespace paged_attn
