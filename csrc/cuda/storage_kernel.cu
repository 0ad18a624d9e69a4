// Launchers of storage.cuh. The contract is in ../storage.h.
#include "storage.cuh"

namespace fastamp::cuda {

namespace {

constexpr int kThreads = StreamPolicy::kThreads;

template <StorageFormat kFormat>
struct Tag {
  static constexpr StorageFormat value = kFormat;
};

template <class Fn>
void dispatch_format(StorageFormat format, const Fn& fn) {
  switch (format) {
    case StorageFormat::kInt8: return fn(Tag<StorageFormat::kInt8>{});
    case StorageFormat::kInt4: return fn(Tag<StorageFormat::kInt4>{});
    case StorageFormat::kFp8E4M3: return fn(Tag<StorageFormat::kFp8E4M3>{});
    case StorageFormat::kFp8E5M2: return fn(Tag<StorageFormat::kFp8E5M2>{});
  }
}

// float64 is never stored in a codec: no kernel is compiled for it.
template <class Fn>
void dispatch_codec_dtype(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kFloat16: return fn(__half{});
    case DType::kBFloat16: return fn(__nv_bfloat16{});
    default: return fn(float{});
  }
}

// fn(Word{}) with the unsigned integer as wide as the dtype.
template <class Fn>
void dispatch_word(DType dtype, const Fn& fn) {
  switch (element_size(dtype)) {
    case 2: return fn(uint16_t{});
    case 4: return fn(uint32_t{});
    default: return fn(uint64_t{});
  }
}

unsigned blocks_for(int64_t numel, int64_t elements_per_block) {
  return static_cast<unsigned>(
      std::min<int64_t>((numel + elements_per_block - 1) / elements_per_block, grid_limit(StreamPolicy::kMaxBlocks)));
}

unsigned mask_blocks(int64_t numel) { return blocks_for(numel, int64_t{kWarpMaskElements} * StreamPolicy::kWarps); }

template <StorageFormat kFormat, class T>
void launch_quantize(const Quantize& args, Stream on) {
  const unsigned blocks = blocks_for(args.numel, kThreadElements * kThreads);
  if (args.stochastic) {
    FASTAMP_LAUNCH(blocks, kThreads, 0, on, quantize_kernel<kFormat, T, true>)(args);
  } else {
    FASTAMP_LAUNCH(blocks, kThreads, 0, on, quantize_kernel<kFormat, T, false>)(args);
  }
  check_launch("quantize_blockwise");
}

}  // namespace

void quantize(const Quantize& args, void* stream) {
  dispatch_format(args.format, [&](auto format) {
    dispatch_codec_dtype(args.dtype, [&](auto tag) {
      launch_quantize<decltype(format)::value, decltype(tag)>(args, static_cast<Stream>(stream));
    });
  });
}

void dequantize(const Dequantize& args, void* stream) {
  const auto on = static_cast<Stream>(stream);
  dispatch_format(args.format, [&](auto format) {
    dispatch_codec_dtype(args.dtype, [&](auto tag) {
      constexpr StorageFormat kFormat = decltype(format)::value;
      using T = decltype(tag);
      const unsigned blocks = blocks_for(args.numel, kThreads * 128 / Codec<kFormat>::kBits);
      FASTAMP_LAUNCH(blocks, kThreads, 0, on, dequantize_kernel<kFormat, T>)(args);
      check_launch("dequantize_blockwise");
    });
  });
}

void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* payload, void* stream) {
  FASTAMP_LAUNCH(mask_blocks(numel), kThreads, 0, static_cast<Stream>(stream), pack_bits_kernel)
  (mask, numel, payload);
  check_launch("pack_bits");
}

void pack_scaled_mask(const PackScaledMask& args, void* stream) {
  const auto on = static_cast<Stream>(stream);
  dispatch_word(args.dtype, [&](auto tag) {
    using Word = decltype(tag);
    FASTAMP_LAUNCH(mask_blocks(args.numel), kThreads, 0, on, pack_scaled_mask_kernel<Word>)
    (static_cast<const Word*>(args.x), args.numel, args.payload, args.seen);
    check_launch("pack_scaled_mask");
    FASTAMP_LAUNCH(1, 1, 0, on, finish_scaled_mask_kernel<Word>)
    (args.seen, static_cast<Word>(nan_word(args.dtype)), static_cast<Word*>(args.value));
    check_launch("pack_scaled_mask");
  });
}

void unpack_bits(const UnpackBits& args, void* stream) {
  const auto on = static_cast<Stream>(stream);
  auto launch = [&](auto tag) {
    using Word = decltype(tag);
    FASTAMP_LAUNCH(mask_blocks(args.numel), kThreads, 0, on, unpack_bits_kernel<Word>)
    (args.payload, args.numel, static_cast<const Word*>(args.value), static_cast<Word*>(args.out));
    check_launch("unpack_bits");
  };
  if (!args.value) return launch(uint8_t{});
  dispatch_word(args.dtype, launch);
}

}  // namespace fastamp::cuda
