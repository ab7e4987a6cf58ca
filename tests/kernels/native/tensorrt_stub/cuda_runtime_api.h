// Declares the only CUDA name that the stub in this folder uses.
#pragma once
typedef struct CUstream_st* cudaStream_t;
