#define DW_PROBE_TABLE probe_i8mm
#include "probe_arm.h"
