// Writes the patches of an NHWC image as rows of a matrix, to compute a convolution as a product if no fused kernel
// takes it.
#include "launch.cuh"

struct Geometry {
  int64_t height, width, channels, out_height, out_width;
  int kernel_h, kernel_w, stride_h, stride_w;
  int64_t pad_h, pad_w;  // 64 bits, because twice the padding can overflow an int
  int dilation_h, dilation_w;
};

template <class T>
__global__ void im2col_kernel(const T* x, T* columns, Geometry g, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; at < total; at += step) {
    int64_t c = at % g.channels, rest = at / g.channels;
    const int64_t kw = rest % g.kernel_w;
    rest /= g.kernel_w;
    const int64_t kh = rest % g.kernel_h;
    rest /= g.kernel_h;
    const int64_t ow = rest % g.out_width;
    rest /= g.out_width;
    const int64_t oh = rest % g.out_height, image = rest / g.out_height;
    const int64_t h = oh * g.stride_h - g.pad_h + kh * g.dilation_h, w = ow * g.stride_w - g.pad_w + kw * g.dilation_w;
    const bool inside = h >= 0 && h < g.height && w >= 0 && w < g.width;
    columns[at] = inside ? x[((image * g.height + h) * g.width + w) * g.channels + c] : T(0);
  }
}

template <class T>
int run(const void* x, void* columns, Geometry g, int64_t total, void* stream) {
  const int64_t wanted = (total + kThreads - 1) / kThreads;
  const unsigned blocks = static_cast<unsigned>(wanted < 4096 ? wanted : 4096);
  return launch(blocks, stream, im2col_kernel<T>, static_cast<const T*>(x), static_cast<T*>(columns), g, total);
}

extern "C" int accel_im2col(const void* x, void* columns, int element_size, int64_t images, int64_t height,
                            int64_t width, int64_t channels, const int32_t geometry[8], void* stream) {
  if (!x || !columns || !geometry) return ACCEL_NULL_POINTER;
  if (images < 1 || height < 1 || width < 1 || channels < 1) return ACCEL_BAD_SIZE;
  for (int i = 0; i < 8; ++i)
    if (geometry[i] < (i == 4 || i == 5 ? 0 : 1)) return ACCEL_BAD_SIZE;
  Geometry g{height,      width,       channels,    0,           0,           geometry[0], geometry[1],
             geometry[2], geometry[3], geometry[4], geometry[5], geometry[6], geometry[7]};
  const int64_t room_h = height + 2 * g.pad_h - static_cast<int64_t>(g.dilation_h) * (g.kernel_h - 1) - 1;
  const int64_t room_w = width + 2 * g.pad_w - static_cast<int64_t>(g.dilation_w) * (g.kernel_w - 1) - 1;
  if (room_h < 0 || room_w < 0) return ACCEL_BAD_SIZE;
  g.out_height = room_h / g.stride_h + 1;
  g.out_width = room_w / g.stride_w + 1;
  const int64_t total = images * g.out_height * g.out_width * g.kernel_h * g.kernel_w * channels;
  if (element_size == 1) return run<uint8_t>(x, columns, g, total, stream);
  if (element_size == 2) return run<uint16_t>(x, columns, g, total, stream);
  if (element_size == 4) return run<uint32_t>(x, columns, g, total, stream);
  return ACCEL_BAD_DTYPE;
}
