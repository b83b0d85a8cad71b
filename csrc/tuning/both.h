// Functions that the host and a GPU run alike.
#pragma once

#if defined(__CUDACC__)
#define SB_BOTH __host__ __device__
#else
#define SB_BOTH
#endif
