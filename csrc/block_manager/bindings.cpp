// paged_attn._block_manager: BlockManager for Python. The GIL is held throughout every call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <limits>

#include "block_manager.h"
#include "docs.h"
#include "errors.h"
#include "python_args.h"
#include "step_arrays.h"

namespace paged_attn {
namespace {

BlockManager make_manager(py::object num_blocks, py::object block_size) {
  constexpr const char* kWhere = "paged_attn.BlockManager";
  return BlockManager(to_int64(kWhere, "num_blocks", num_blocks),
                      to_int64(kWhere, "block_size", block_size));
}

int64_t allocate(BlockManager& manager, py::object seq_id, py::object num_tokens) {
  constexpr const char* kWhere = "paged_attn.BlockManager.allocate";
  const int64_t id = to_int64(kWhere, "seq_id", seq_id);
  return manager.allocate(id, to_int64(kWhere, "num_tokens", num_tokens));
}

std::vector<BlockCopy> append(BlockManager& manager, py::object seq_ids, py::object num_tokens) {
  constexpr const char* kWhere = "paged_attn.BlockManager.append";
  if (is_sequence(seq_ids)) {
    const std::vector<int64_t> ids = to_int64s(kWhere, "seq_ids", seq_ids);
    return manager.append(ids, to_per_sequence(kWhere, "num_tokens", num_tokens));
  }
  const int64_t id = to_int64(kWhere, "seq_id", seq_ids);
  PerSequence count;
  count.common = to_int64(kWhere, "num_tokens", num_tokens);
  return manager.append({id}, count);
}

void free_sequence(BlockManager& manager, py::object seq_id) {
  manager.free(to_int64("paged_attn.BlockManager.free", "seq_id", seq_id));
}

py::array_t<int32_t> block_table(const BlockManager& manager, py::object seq_id) {
  const std::vector<int32_t>& blocks =
      manager.block_table(to_int64("paged_attn.BlockManager.block_table", "seq_id", seq_id));
  return py::array_t<int32_t>(static_cast<py::ssize_t>(blocks.size()), blocks.data());
}

int32_t num_tokens(const BlockManager& manager, py::object seq_id) {
  return manager.num_tokens(to_int64("paged_attn.BlockManager.num_tokens", "seq_id", seq_id));
}

py::dict stats(const BlockManager& manager) {
  const Stats stats = manager.stats();
  py::dict result;
  result["used"] = stats.used;
  result["shared"] = stats.shared;
  result["cached"] = stats.cached;
  result["free"] = stats.free;
  result["evicted"] = stats.evicted;
  result["hit_tokens"] = stats.hit_tokens;
  result["utilization"] = stats.utilization;
  return result;
}

py::object step_inputs(const BlockManager& manager, py::object seq_ids, py::object query_lens,
                       py::object width, py::object pad_to, py::object out) {
  const std::vector<int64_t> ids = to_int64s(kStepInputs, "seq_ids", seq_ids);
  const PerSequence lens = to_per_sequence(kStepInputs, "query_lens", query_lens);
  const std::optional<int64_t> columns = to_optional_int64(kStepInputs, "width", width);
  const std::optional<int64_t> rows = to_optional_int64(kStepInputs, "pad_to", pad_to);
  std::array<py::array, 4> arrays;
  if (!out.is_none()) arrays = caller_arrays(out);

  // NOTE: from here to write_step nothing may run Python code that could change the manager: the
  // plan points into it. Creating numpy arrays does not (they are not tracked by Python's garbage
  // collector, so they never start it).
  const StepPlan plan = manager.plan_step(ids, lens, rows);
  if (columns && (*columns < plan.min_width || *columns > std::numeric_limits<int32_t>::max())) {
    throw_invalid(kStepInputs, "width",
                  "at least the blocks of the longest sequence, " + std::to_string(plan.min_width) +
                      ", and at most 2147483647",
                  *columns);
  }
  if (out.is_none()) {
    arrays = new_arrays(plan, columns.value_or(plan.min_width));
  } else {
    check_caller_arrays(arrays, plan, columns);
  }
  StepBuffers buffers;
  buffers.block_tables = static_cast<int32_t*>(arrays[0].mutable_data());
  buffers.width = arrays[0].shape(1);
  buffers.context_lens = static_cast<int32_t*>(arrays[1].mutable_data());
  buffers.slot_mapping = static_cast<int64_t*>(arrays[2].mutable_data());
  buffers.num_slots = arrays[2].shape(0);
  buffers.cu_seqlens_q = static_cast<int32_t*>(arrays[3].mutable_data());
  manager.write_step(plan, buffers);
  return py::make_tuple(arrays[0], arrays[1], arrays[2], arrays[3]);
}

// A new exception type of the package, as pickle and tracebacks should name it. Never destroyed:
// the translator may run until the interpreter ends.
py::handle new_exception(py::module_& module, const char* name, const char* doc, py::handle base,
                         py::handle attributes = nullptr) {
  const std::string qualified = std::string("paged_attn.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, base.ptr(), attributes.ptr());
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, type);
  return type;
}

py::handle out_of_blocks_type;
py::handle unknown_sequence_type;

void translate_exception(std::exception_ptr exception) {
  try {
    if (exception) std::rethrow_exception(exception);
  } catch (const OutOfBlocks& error) {
    py::object raised = out_of_blocks_type(error.what());
    raised.attr("needed") = error.needed;
    raised.attr("free") = error.free;
    PyErr_SetObject(out_of_blocks_type.ptr(), raised.ptr());
  } catch (const UnknownSequence& error) {
    PyErr_SetString(unknown_sequence_type.ptr(), error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_block_manager, module) {
  py::options options;
  options.disable_function_signatures();  // docs.h states them, with Python's types
  module.doc() = "Block tables of a paged KV cache; see paged_attn.BlockManager.";

  out_of_blocks_type = new_exception(module, "OutOfBlocks", kOutOfBlocksDoc, PyExc_RuntimeError);
  // KeyError prints the repr of its message; this one is a sentence.
  py::dict attributes;
  attributes["__str__"] = py::handle(PyExc_Exception).attr("__str__");
  unknown_sequence_type =
      new_exception(module, "UnknownSequence", kUnknownSequenceDoc, PyExc_KeyError, attributes);
  py::register_local_exception_translator(translate_exception);

  py::class_<BlockManager> manager(module, "BlockManager", kBlockManagerDoc);
  manager.attr("__module__") = "paged_attn";
  manager.def(py::init(&make_manager), py::arg("num_blocks"), py::arg("block_size"))
      .def("allocate", &allocate, kAllocateDoc, py::arg("seq_id"), py::kw_only(),
           py::arg("num_tokens"))
      // Twice, for the two names of its argument; the first takes positional ones of either form.
      .def("append", &append, kAppendDoc, py::arg("seq_id"), py::kw_only(),
           py::arg("num_tokens") = 1)
      .def("append", &append, py::arg("seq_ids"), py::kw_only(), py::arg("num_tokens") = 1)
      .def("free", &free_sequence, kFreeDoc, py::arg("seq_id"))
      .def("block_table", &block_table, kBlockTableDoc, py::arg("seq_id"))
      .def("num_tokens", &num_tokens, kNumTokensDoc, py::arg("seq_id"))
      .def("stats", &stats, kStatsDoc)
      .def("step_inputs", &step_inputs, kStepInputsDoc, py::arg("seq_ids"), py::kw_only(),
           py::arg("query_lens") = 1, py::arg("width") = py::none(), py::arg("pad_to") = py::none(),
           py::arg("out") = py::none())
      .def("check", &BlockManager::check, kCheckDoc)
      .def_property_readonly("num_free_blocks", &BlockManager::num_free_blocks, kNumFreeBlocksDoc)
      .def_property_readonly("num_blocks", &BlockManager::num_blocks, "Blocks in the pool.")
      .def_property_readonly("block_size", &BlockManager::block_size, "Slots (tokens) a block.");
}

}  // namespace paged_attn
