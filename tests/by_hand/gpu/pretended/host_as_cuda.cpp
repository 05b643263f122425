// A "cuda" device whose memory is the host's and whose kernels are the CPU's. An operation that mixes the
// two devices raises, as on a GPU. It measures nothing: there are no streams, no NCCL and no CUDA kernels.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>
#include <string>

using namespace c10;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;

static const Device GPU(DeviceType::CUDA, 0);

// ---- what torch asks a device -------------------------------------------------------------------

namespace c10::impl {
struct PretendedGuard final : public DeviceGuardImplInterface {
  PretendedGuard() = default;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream stream() const { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int = 0) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard);
}  // namespace c10::impl

struct CUDAHooks : public at::CUDAHooksInterface {  // the registry knows it by this name
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

struct HostMemory final : c10::Allocator {
  DataPtr allocate(size_t n) override {
    void* p = n ? aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    return {p, p, &free, GPU};
  }
  DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static HostMemory host_memory;
static struct AtLoad {
  AtLoad() { c10::SetAllocator(DeviceType::CUDA, &host_memory); }
} at_load;

// ---- the same memory, seen as the other device's ------------------------------------------------

static at::Tensor seen_as(const at::Tensor& t, Device device, DispatchKey key, c10::Allocator* allocator) {
  auto forget = [](void* storage) { delete static_cast<Storage*>(storage); };
  DataPtr memory(t.storage().mutable_data(), new Storage(t.storage()), forget, device);
  auto storage = c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), t.storage().nbytes(), std::move(memory), allocator, true);
  auto seen = at::detail::make_tensor<TensorImpl>(Storage(storage), DispatchKeySet(key), t.dtype());
  seen.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) seen._set_conj(true);
  if (t.is_neg()) seen._set_neg(true);
  return seen;
}
static at::Tensor to_cpu(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  return seen_as(t, Device(DeviceType::CPU), DispatchKey::CPU, c10::GetCPUAllocator());
}
static at::Tensor to_gpu(const at::Tensor& t) {
  if (!t.defined() || t.is_cuda()) return t;
  return seen_as(t, GPU, DispatchKey::CUDA, &host_memory);
}

// ---- every operation: the CPU's kernel on what is seen as the CPU's ------------------------------

// Indices may lie on the CPU.
static const std::set<std::string> MAY_MIX = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index"};

struct Devices {
  bool gpu = false, cpu = false;
  void look(const at::Tensor& t) {
    if (!t.defined()) return;
    if (t.is_cuda()) gpu = true;
    else if (t.dim() > 0) cpu = true;  // a scalar may be the CPU's
  }
};

static IValue argument(const IValue& v, Devices& devices) {
  if (v.isTensor()) {
    devices.look(v.toTensor());
    return to_cpu(v.toTensor());
  }
  if (v.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& t : v.toTensorVector()) {
      devices.look(t);
      all.push_back(to_cpu(t));
    }
    return all;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const auto& t : v.toOptionalTensorVector()) {
      if (t) devices.look(*t);
      all.push_back(t ? std::optional<at::Tensor>(to_cpu(*t)) : t);
    }
    return all;
  }
  if (v.isDevice() && v.toDevice().is_cuda()) return Device(DeviceType::CPU);
  return v;
}

// A result that is one of the arguments, written to: that argument, in its new size.
static std::optional<at::Tensor> written(
    const at::AliasInfo* alias, const at::Tensor& made, const FunctionSchema& schema,
    const std::vector<IValue>& originals) {
  if (!alias || !alias->isWrite()) return std::nullopt;
  for (size_t j = 0; j < originals.size(); j++) {
    const auto* given = schema.arguments()[j].alias_info();
    if (!given || !(*given == *alias)) continue;
    auto original = originals[j].toTensor();
    if (original.is_cuda() && original.sizes() != made.sizes()) {
      auto whole = to_gpu(made);
      auto* impl = original.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(whole.storage());
      impl->set_sizes_and_strides(whole.sizes(), whole.strides(), whole.storage_offset());
    }
    return original;
  }
  return std::nullopt;
}

static void on_the_cpu(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto num = schema.arguments().size(), begin = stack->size() - num;
  std::vector<IValue> originals(stack->end() - num, stack->end());
  Devices devices;
  for (size_t i = 0; i < num; i++) (*stack)[begin + i] = argument(originals[i], devices);
  const auto& overload = schema.operator_name().overload_name;
  const auto name = overload.empty() ? schema.name() : schema.name() + "." + overload;
  TORCH_CHECK(
      !(devices.gpu && devices.cpu) || MAY_MIX.count(schema.name()),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
      name, ")");
  op.callBoxed(stack);
  const auto results = schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; i++) {
    auto& v = (*stack)[first + i];
    if (v.isTensor()) {
      auto old = written(schema.returns()[i].alias_info(), v.toTensor(), schema, originals);
      v = old ? *old : to_gpu(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& t : v.toTensorVector()) all.push_back(to_gpu(t));
      v = all;
    }
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

// ---- what makes tensors, or views of them -------------------------------------------------------

using Sizes = c10::IntArrayRef;
using Dtype = std::optional<c10::ScalarType>;

static at::Tensor empty_of(
    Sizes size, Dtype dtype, std::optional<Layout>, std::optional<Device>, std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_generic(size, &host_memory, keys, c10::dtype_or_default(dtype), format);
}
static at::Tensor empty_with_strides(
    Sizes size, Sizes stride, Dtype dtype, std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &host_memory, keys, c10::dtype_or_default(dtype));
}
static at::Tensor& copy_into(at::Tensor& self, const at::Tensor& source, bool) {
  to_cpu(self).copy_(to_cpu(source));
  return self;
}
static at::Tensor with_strides(const at::Tensor& self, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<TensorImpl>(
      TensorImpl::VIEW, Storage(self.storage()), self.key_set(), self.dtype());
  const auto from = offset.value_or(self.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, from);
  return view;
}
static at::Tensor like_view(const at::Tensor& self, const at::Tensor& v) {
  return with_strides(self, v.sizes(), v.strides(), v.storage_offset());
}
static at::Tensor view_of(const at::Tensor& self, Sizes size) { return like_view(self, to_cpu(self).view(size)); }
static at::Tensor reshaped(const at::Tensor& self, Sizes size, Sizes stride) {
  return with_strides(self, size, stride, self.storage_offset());
}
static at::Tensor unfolded(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return like_view(self, to_cpu(self).unfold(dim, size, step));
}
static void give_memory(StorageImpl* storage, size_t bytes) {
  auto memory = host_memory.allocate(bytes);
  if (const size_t kept = std::min(bytes, storage->nbytes())) memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}
static const at::Tensor& resized(const at::Tensor& self, Sizes size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  auto storage = impl->unsafe_storage();
  if (storage.nbytes() < needed) give_memory(storage.unsafeGetStorageImpl(), needed);
  return self;
}
static at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}
static at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  const int64_t num = source.nbytes() / self.itemsize();
  return set_storage(self, source, 0, {num}, {1});
}
static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
static at::Scalar number(const at::Tensor& self) { return to_cpu(self).item(); }
// The CPU has no products with another dtype's result.
static at::Tensor bmm_into(const at::Tensor& a, const at::Tensor& b, at::ScalarType t) {
  return to_gpu(at::bmm(to_cpu(a).to(t), to_cpu(b).to(t)));
}
static at::Tensor mm_into(const at::Tensor& a, const at::Tensor& b, at::ScalarType t) {
  return to_gpu(at::mm(to_cpu(a).to(t), to_cpu(b).to(t)));
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_of);
  m.impl("empty_strided", empty_with_strides);
  m.impl("copy_", copy_into);
  m.impl("as_strided", with_strides);
  m.impl("view", view_of);
  m.impl("_reshape_alias", reshaped);
  m.impl("unfold", unfolded);
  m.impl("resize_", resized);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_local_scalar_dense", number);
  m.impl("bmm.dtype", bmm_into);
  m.impl("mm.dtype", mm_into);
}

// ---- for host_as_cuda.py ------------------------------------------------------------------------

static at::Tensor seen_by_cpu(const at::Tensor& t) { return to_cpu(t); }
static void resize_storage(const at::Tensor& t, int64_t bytes) {
  give_memory(t.storage().unsafeGetStorageImpl(), bytes);
}
TORCH_LIBRARY(host_as_cuda, m) {
  m.def("seen_by_cpu(Tensor t) -> Tensor", seen_by_cpu);
  m.def("resize_storage(Tensor t, int bytes) -> ()", resize_storage);
}
