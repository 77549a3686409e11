//! A decoder for the pickles that `torch.save` makes of state dicts, and for nothing else.
//!
//! A pickle is a program; Python's own reader runs whatever functions it names. This one knows a
//! short list of names ([`Global`]), turns calls of them into plain values, and refuses every other
//! by name. Values live in one list and refer to each other by number, so shared and cyclic values
//! cost nothing and nothing here recurses. Every value takes at least one byte of input and is
//! small (a tensor refers to its shape and does not copy it), which bounds memory by the input's
//! length.

use std::collections::HashMap;

use skep_wire::Dtype;

use crate::DataError;
use crate::global::Global;

/// The longest pickle that is looked at: names and shapes, not numbers.
pub const MAX_PICKLE_BYTES: usize = 32 << 20;

/// The most values a pickle may have.
const MAX_VALUES: usize = 1_000_000;

/// The most dimensions of a tensor.
const MAX_RANK: usize = 32;

/// A value's place in a [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Node(u32);

/// A tensor as the pickle describes it: a view of a storage that lies elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorRecipe {
    pub(crate) dtype: Dtype,
    /// The storage's name, a text value.
    pub(crate) key: Node,
    /// How many bytes the pickle says the storage has.
    pub(crate) storage_bytes: u64,
    pub(crate) offset: u64,
    pub(crate) shape: Node,
    pub(crate) strides: Node,
}

#[derive(Clone, Debug)]
pub(crate) enum Value {
    None,
    Bool,
    Int(i64),
    Float,
    Text(String),
    Bytes,
    Tuple(Vec<Node>),
    List(Vec<Node>),
    Dict(Vec<(Node, Node)>),
    Global(Global),
    Storage { dtype: Option<Dtype>, key: Node, elements: u64 },
    Tensor(TensorRecipe),
}

/// A decoded pickle.
#[derive(Debug)]
pub(crate) struct Pickle {
    values: Vec<Value>,
    root: Node,
}

impl Pickle {
    /// Runs the program, which can do nothing but make values.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DataError> {
        if bytes.len() > MAX_PICKLE_BYTES {
            return Err(DataError::Pickle {
                at: 0,
                reason: format!("it has {} bytes, over {MAX_PICKLE_BYTES}", bytes.len()),
            });
        }
        let mut machine = Machine {
            bytes,
            at: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        let root = loop {
            let start = machine.at;
            match machine.step() {
                Ok(None) => {}
                Ok(Some(root)) => break root,
                Err(reason) => return Err(DataError::Pickle { at: start, reason }),
            }
        };
        Ok(Self { values: machine.values, root })
    }

    pub(crate) fn root(&self) -> Node {
        self.root
    }

    pub(crate) fn value(&self, node: Node) -> &Value {
        &self.values[node.0 as usize]
    }

    /// A shape or strides.
    pub(crate) fn numbers(&self, node: Node) -> Result<Vec<u64>, String> {
        let items = match self.value(node) {
            Value::Tuple(items) | Value::List(items) => items,
            _ => return Err("its shape is no tuple".to_owned()),
        };
        if items.len() > MAX_RANK {
            return Err(format!("it has {} dimensions, over {MAX_RANK}", items.len()));
        }
        items.iter().map(|&item| number(&self.values, item)).collect()
    }

    pub(crate) fn text(&self, node: Node) -> Option<&str> {
        match self.value(node) {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }
}

struct Machine<'bytes> {
    bytes: &'bytes [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Node>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u64, Node>,
}

type Step<T> = Result<T, String>;

impl<'bytes> Machine<'bytes> {
    /// One instruction; the root once the program stops.
    fn step(&mut self) -> Step<Option<Node>> {
        match self.take(1)?[0] {
            0x80 => match self.take(1)?[0] {
                0..=5 => {}
                protocol => return Err(format!("protocol {protocol} is not known")),
            },
            // A frame's length is of use to readers of streams only.
            0x95 => self.take(8).map(|_| ())?,
            b'.' => return self.pop().map(Some),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => self.pop().map(|_| ())?,
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            b'N' => self.push(Value::None)?,
            0x88 | 0x89 => self.push(Value::Bool)?,
            b'J' => {
                let number = self.unsigned(4)? as u32;
                self.push(Value::Int(i64::from(number as i32)))?;
            }
            b'K' => self.push_int(1)?,
            b'M' => self.push_int(2)?,
            0x8a => {
                let length = self.take(1)?[0] as usize;
                let bytes = self.take(length)?;
                let number = long(bytes).ok_or("an integer has more than 64 bits")?;
                self.push(Value::Int(number))?;
            }
            b'G' => {
                self.take(8)?;
                self.push(Value::Float)?;
            }
            b'X' => self.push_text(4)?,
            0x8c => self.push_text(1)?,
            0x8d => self.push_text(8)?,
            b'U' => self.push_text(1)?,
            b'T' => self.push_text(4)?,
            b'C' => self.push_bytes(1)?,
            b'B' => self.push_bytes(4)?,
            0x8e => self.push_bytes(8)?,
            b')' => self.push(Value::Tuple(Vec::new()))?,
            0x85 => self.push_tuple(1)?,
            0x86 => self.push_tuple(2)?,
            0x87 => self.push_tuple(3)?,
            b't' => {
                let items = self.pop_mark()?;
                self.push(Value::Tuple(items))?;
            }
            b']' => self.push(Value::List(Vec::new()))?,
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Value::List(items))?;
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b'd' => {
                let items = self.pop_mark()?;
                self.push(Value::Dict(Vec::new()))?;
                self.set_items(items)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(vec![key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set_items(items)?;
            }
            b'q' => {
                let key = self.unsigned(1)?;
                self.remember(key)?;
            }
            b'r' => {
                let key = self.unsigned(4)?;
                self.remember(key)?;
            }
            0x94 => self.remember(self.memo.len() as u64)?,
            b'h' => {
                let key = self.unsigned(1)?;
                self.recall(key)?;
            }
            b'j' => {
                let key = self.unsigned(4)?;
                self.recall(key)?;
            }
            b'c' => {
                let module = self.line()?;
                let name = self.line()?;
                self.push_global(module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Value::Text(name), Value::Text(module)) =
                    (self.value(name).clone(), self.value(module).clone())
                else {
                    return Err("the name of a function is no text".to_owned());
                };
                self.push_global(&module, &name)?;
            }
            b'R' => self.call()?,
            b'b' => {
                // State dicts carry `_metadata` this way; nothing in it is a tensor.
                self.pop()?;
                let under = self.top()?;
                if !matches!(self.value(under), Value::Dict(_)) {
                    return Err("it sets the state of an object".to_owned());
                }
            }
            b'Q' => self.push_storage()?,
            code => {
                return Err(format!(
                    "instruction 0x{code:02x} has no place in a state dict of tensors"
                ));
            }
        }
        Ok(None)
    }

    fn take(&mut self, count: usize) -> Step<&'bytes [u8]> {
        let end = self.at.checked_add(count).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or("it ends too early")?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    /// A little-endian number of up to eight bytes.
    fn unsigned(&mut self, width: usize) -> Step<u64> {
        Ok(self.take(width)?.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn prefixed(&mut self, width: usize) -> Step<&'bytes [u8]> {
        let length = self.unsigned(width)?;
        self.take(usize::try_from(length).map_err(|_| "a text is too long")?)
    }

    fn line(&mut self) -> Step<&'bytes str> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().take(512).position(|&byte| byte == b'\n');
        let line = self.take(length.ok_or("a name does not end")?)?;
        self.take(1)?;
        std::str::from_utf8(line).map_err(|_| "a name is no UTF-8".to_owned())
    }

    fn value(&self, node: Node) -> &Value {
        &self.values[node.0 as usize]
    }

    fn push(&mut self, value: Value) -> Step<()> {
        if self.values.len() >= MAX_VALUES {
            return Err(format!("it has more than {MAX_VALUES} values"));
        }
        self.stack.push(Node(self.values.len() as u32));
        self.values.push(value);
        Ok(())
    }

    fn push_int(&mut self, width: usize) -> Step<()> {
        let number = self.unsigned(width)?;
        self.push(Value::Int(number as i64))
    }

    fn push_text(&mut self, width: usize) -> Step<()> {
        let bytes = self.prefixed(width)?;
        let text = std::str::from_utf8(bytes).map_err(|_| "a text is no UTF-8")?;
        self.push(Value::Text(text.to_owned()))
    }

    fn push_bytes(&mut self, width: usize) -> Step<()> {
        self.prefixed(width)?;
        self.push(Value::Bytes)
    }

    fn push_tuple(&mut self, count: usize) -> Step<()> {
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(self.pop()?);
        }
        items.reverse();
        self.push(Value::Tuple(items))
    }

    fn push_global(&mut self, module: &str, name: &str) -> Step<()> {
        let global = Global::find(module, name).ok_or_else(|| {
            let (module, name): (String, String) =
                (module.chars().take(128).collect(), name.chars().take(128).collect());
            format!(
                "it names `{module}.{name}`, which has no place in a state dict of tensors; \
                 nothing was run. Save weights only: torch.save(model.state_dict(), path)"
            )
        })?;
        self.push(Value::Global(global))
    }

    fn top(&self) -> Step<Node> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack
            .get(floor..)
            .and_then(<[_]>::last)
            .copied()
            .ok_or("its stack is empty".to_owned())
    }

    fn pop(&mut self) -> Step<Node> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_mark(&mut self) -> Step<Vec<Node>> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    fn append(&mut self, items: Vec<Node>) -> Step<()> {
        let list = self.top()?;
        match &mut self.values[list.0 as usize] {
            Value::List(list) => list.extend(items),
            _ => return Err("it appends to what is no list".to_owned()),
        }
        Ok(())
    }

    fn set_items(&mut self, items: Vec<Node>) -> Step<()> {
        let dict = self.top()?;
        let pairs = items.chunks_exact(2);
        if !pairs.remainder().is_empty() {
            return Err("a key has no value".to_owned());
        }
        match &mut self.values[dict.0 as usize] {
            Value::Dict(dict) => dict.extend(pairs.map(|pair| (pair[0], pair[1]))),
            _ => return Err("it sets items of what is no dict".to_owned()),
        }
        Ok(())
    }

    fn remember(&mut self, key: u64) -> Step<()> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Step<()> {
        let node = self.memo.get(&key).ok_or("it recalls what it never kept")?;
        self.stack.push(*node);
        Ok(())
    }

    /// `('storage', type, key, device, elements)`, which is how `torch.save` names a storage.
    fn push_storage(&mut self) -> Step<()> {
        let id = self.pop()?;
        let items = self.tuple(id).ok_or("a storage's name is no tuple")?;
        let &[kind, class, key, _, elements] = items else {
            return Err("a storage's name has not five parts".to_owned());
        };
        let storage = match (self.value(kind), self.value(class), self.value(key)) {
            (Value::Text(kind), Value::Global(Global::Storage(dtype)), Value::Text(_))
                if kind == "storage" =>
            {
                Value::Storage { dtype: *dtype, key, elements: self.number(elements)? }
            }
            _ => return Err("a storage's name is not one that torch.save makes".to_owned()),
        };
        self.push(storage)
    }

    fn tuple(&self, node: Node) -> Option<&[Node]> {
        match self.value(node) {
            Value::Tuple(items) => Some(items),
            _ => None,
        }
    }

    fn number(&self, node: Node) -> Step<u64> {
        number(&self.values, node)
    }

    fn call(&mut self) -> Step<()> {
        let arguments = self.pop()?;
        let function = self.pop()?;
        let &Value::Global(function) = self.value(function) else {
            return Err("it calls what is no function".to_owned());
        };
        let arguments = self.tuple(arguments).ok_or("arguments are no tuple")?;
        match (function, arguments) {
            (Global::OrderedDict, []) => self.push(Value::Dict(Vec::new())),
            // A size is the tuple it is made of.
            (Global::Size, &[sizes]) if self.tuple(sizes).is_some() => {
                self.stack.push(sizes);
                Ok(())
            }
            (Global::RebuildTensor, &[storage, offset, shape, strides, ..]) => {
                let recipe = self.recipe(storage, offset, shape, strides, None)?;
                self.push(Value::Tensor(recipe))
            }
            (Global::RebuildTensorV3, &[storage, offset, shape, strides, _, _, dtype, ..]) => {
                let &Value::Global(Global::Dtype(dtype)) = self.value(dtype) else {
                    return Err("a tensor's type is none".to_owned());
                };
                let recipe = self.recipe(storage, offset, shape, strides, Some(dtype))?;
                self.push(Value::Tensor(recipe))
            }
            // A parameter is the tensor it is made of.
            (Global::RebuildParameter, &[tensor, ..])
                if matches!(self.value(tensor), Value::Tensor(_)) =>
            {
                self.stack.push(tensor);
                Ok(())
            }
            (function, _) => Err(format!("{function:?} is not called the way torch.save does")),
        }
    }

    fn recipe(
        &self,
        storage: Node,
        offset: Node,
        shape: Node,
        strides: Node,
        dtype: Option<Dtype>,
    ) -> Step<TensorRecipe> {
        let &Value::Storage { dtype: stored, key, elements } = self.value(storage) else {
            return Err("a tensor has no storage".to_owned());
        };
        let dtype = dtype.or(stored).ok_or("a tensor has no element type")?;
        let width = stored.map_or(1, |stored| stored.bitsize() as u64 / 8);
        Ok(TensorRecipe {
            dtype,
            key,
            storage_bytes: elements.checked_mul(width).ok_or("a storage is too large")?,
            offset: self.number(offset)?,
            shape,
            strides,
        })
    }
}

fn number(values: &[Value], node: Node) -> Step<u64> {
    match &values[node.0 as usize] {
        Value::Int(number) => u64::try_from(*number).map_err(|_| format!("{number} is negative")),
        _ => Err("a number was expected".to_owned()),
    }
}

/// A little-endian two's complement number.
fn long(bytes: &[u8]) -> Option<i64> {
    let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    if bytes.len() > 8 {
        return None;
    }
    let mut wide = [if negative { 0xff } else { 0 }; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    Some(i64::from_le_bytes(wide))
}
