//! The names that a pickle of a state dict may use. Whatever is not here is refused; nothing here is
//! ever run.

use skep_wire::Dtype;

/// The functions and types a pickle may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Global {
    OrderedDict,
    Size,
    /// `_rebuild_tensor` and `_rebuild_tensor_v2`: storage, offset, shape, strides, whatever.
    RebuildTensor,
    /// The same with the element type behind the sixth argument, over an untyped storage.
    RebuildTensorV3,
    RebuildParameter,
    /// A storage of elements of a type; bytes where there is none.
    Storage(Option<Dtype>),
    Dtype(Dtype),
}

impl Global {
    /// Looks a name up.
    pub(crate) fn find(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch", "Size") => Self::Size,
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => Self::RebuildTensor,
            ("torch._utils", "_rebuild_tensor_v3") => Self::RebuildTensorV3,
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
                Self::RebuildParameter
            }
            ("torch" | "torch.storage", "UntypedStorage" | "_UntypedStorage") => {
                Self::Storage(None)
            }
            ("torch" | "torch.cuda", name) => match name.strip_suffix("Storage") {
                Some(kind) => Self::Storage(Some(match kind {
                    "Double" => Dtype::F64,
                    "Float" => Dtype::F32,
                    "Half" => Dtype::F16,
                    "BFloat16" => Dtype::BF16,
                    "Long" => Dtype::I64,
                    "Int" => Dtype::I32,
                    "Short" => Dtype::I16,
                    "Char" => Dtype::I8,
                    "Byte" => Dtype::U8,
                    "Bool" => Dtype::BOOL,
                    _ => return None,
                })),
                None => Self::Dtype(match name {
                    "float64" => Dtype::F64,
                    "float32" => Dtype::F32,
                    "float16" => Dtype::F16,
                    "bfloat16" => Dtype::BF16,
                    "int64" => Dtype::I64,
                    "int32" => Dtype::I32,
                    "int16" => Dtype::I16,
                    "int8" => Dtype::I8,
                    "uint64" => Dtype::U64,
                    "uint32" => Dtype::U32,
                    "uint16" => Dtype::U16,
                    "uint8" => Dtype::U8,
                    "bool" => Dtype::BOOL,
                    _ => return None,
                }),
            },
            _ => return None,
        })
    }
}
