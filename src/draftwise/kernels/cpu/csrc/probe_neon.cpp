#define DW_PROBE_TABLE probe_neon
#include "probe_arm.h"
