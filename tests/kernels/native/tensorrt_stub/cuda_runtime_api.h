// The one name of CUDA that the stub beside this file uses.
#pragma once
typedef struct CUstream_st* cudaStream_t;
