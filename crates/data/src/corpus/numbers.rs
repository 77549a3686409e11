//! numpy's `.npy` files of whole numbers, and of lists of whole numbers, which numpy pickles.
//!
//! A pickle is a program, and numpy's own reader runs it. This one knows the handful of names that
//! numpy writes for an array of objects, turns them into plain values, and refuses every other by
//! name: nothing is ever run. Values are two words each and take at least one byte of input, which
//! bounds memory by the input's length; nothing recurses.

use std::collections::HashMap;

use crate::npy::{self, Header};

/// The contents of a `.npy` file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// An array of whole numbers.
    Flat {
        /// Its sizes.
        shape: Vec<usize>,
        /// Row by row.
        values: Vec<i64>,
    },
    /// An array, of one dimension, of lists of whole numbers.
    Lists(Vec<Vec<i64>>),
}

/// Reads a `.npy` file; what is wrong with it otherwise.
pub fn decode(bytes: &[u8]) -> Result<Numbers, String> {
    let Header { kind, shape, by_column, body } = npy::header(bytes)?;
    let count = shape.iter().try_fold(1usize, |product, &side| product.checked_mul(side));
    let count = count.ok_or("its header promises too much")?;
    if kind == "|O" || kind == "O" {
        let lists = Machine::new(body).run()?;
        if shape.len() != 1 || lists.len() != count {
            return Err(format!("{} lists where the header says {shape:?}", lists.len()));
        }
        return Ok(Numbers::Lists(lists));
    }
    let order = kind.as_bytes().first().copied().unwrap_or(b' ');
    let width = match kind.get(1..) {
        Some("i1" | "u1" | "b1") => 1,
        Some("i2" | "u2") => 2,
        Some("i4" | "u4") => 4,
        Some("i8" | "u8") => 8,
        _ => return Err(format!("elements of type `{kind}`; whole numbers are needed")),
    };
    if order == b'>' || by_column {
        return Err("big-endian or column-major arrays are not read".to_owned());
    }
    if count.checked_mul(width) != Some(body.len()) {
        return Err(format!("{} bytes where the header says {shape:?}", body.len()));
    }
    let signed = kind.as_bytes().get(1) == Some(&b'i');
    let values = body.chunks_exact(width).map(|bytes| integer(bytes, signed)).collect();
    Ok(Numbers::Flat { shape, values })
}

/// A little-endian number of one to eight bytes.
fn integer(bytes: &[u8], signed: bool) -> i64 {
    let negative = signed && bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let mut wide = [if negative { 0xff } else { 0 }; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(wide)
}

/// The names that numpy writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Global {
    /// `numpy.core.multiarray._reconstruct`: an array that its state fills.
    Reconstruct,
    Array,
    Dtype,
    /// `_codecs.encode`, by which old protocols write bytes.
    Encode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    /// None, truth values, texts, bytes, floats: of no use here.
    Plain,
    Int(i64),
    /// A place among the texts.
    Text(u32),
    /// A place among the lists; tuples are lists.
    List(u32),
    Global(Global),
    /// An element type, or an array that has no state yet.
    Made(Global),
    /// An array: a list of its elements.
    Array(u32),
}

struct Machine<'bytes> {
    bytes: &'bytes [u8],
    at: usize,
    stack: Vec<Value>,
    marks: Vec<usize>,
    lists: Vec<Vec<Value>>,
    texts: Vec<&'bytes str>,
    memo: HashMap<u64, Value>,
}

type Step<T> = Result<T, String>;

impl<'bytes> Machine<'bytes> {
    fn new(bytes: &'bytes [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            stack: Vec::new(),
            marks: Vec::new(),
            lists: Vec::new(),
            texts: Vec::new(),
            memo: HashMap::new(),
        }
    }

    /// The lists of the array that the program makes.
    fn run(mut self) -> Result<Vec<Vec<i64>>, String> {
        let root = loop {
            let start = self.at;
            match self.step() {
                Ok(None) => {}
                Ok(Some(root)) => break root,
                Err(reason) => return Err(format!("pickle, at byte {start}: {reason}")),
            }
        };
        let Value::Array(elements) = root else {
            return Err("the pickle is no array of objects".to_owned());
        };
        // A list that is there many times is copied many times: that is bounded here.
        let mut room = self.bytes.len();
        let mut lists = Vec::new();
        for &element in self.list(elements) {
            let Value::List(list) = element else {
                return Err("an element of the array is no list".to_owned());
            };
            let list = self.list(list);
            room = room.checked_sub(list.len()).ok_or("its lists refer to each other")?;
            let number = |value: &Value| match value {
                Value::Int(number) => Ok(*number),
                _ => Err("a list has something else than whole numbers".to_owned()),
            };
            lists.push(list.iter().map(number).collect::<Result<Vec<_>, _>>()?);
        }
        Ok(lists)
    }

    fn list(&self, at: u32) -> &[Value] {
        &self.lists[at as usize]
    }

    /// One instruction; the root once the program stops.
    fn step(&mut self) -> Step<Option<Value>> {
        match self.take(1)?[0] {
            0x80 => match self.take(1)?[0] {
                0..=5 => {}
                protocol => return Err(format!("protocol {protocol} is not known")),
            },
            0x95 => self.take(8).map(|_| ())?,
            b'.' => return self.pop().map(Some),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => self.pop().map(|_| ())?,
            b'N' | 0x88 | 0x89 => self.stack.push(Value::Plain),
            b'J' => self.push_integer(4, true)?,
            b'K' => self.push_integer(1, false)?,
            b'M' => self.push_integer(2, false)?,
            0x8a => match self.take(1)?[0] {
                length @ 0..=8 => self.push_integer(length.into(), true)?,
                _ => return Err("a number has more than 64 bits".to_owned()),
            },
            b'G' => {
                self.take(8)?;
                self.stack.push(Value::Plain);
            }
            b'X' | b'T' => self.push_text(4)?,
            0x8c | b'U' => self.push_text(1)?,
            0x8d => self.push_text(8)?,
            b'C' => self.skip_bytes(1)?,
            b'B' => self.skip_bytes(4)?,
            0x8e => self.skip_bytes(8)?,
            b')' | b']' => self.push_list(Vec::new()),
            0x85 => self.push_tuple(1)?,
            0x86 => self.push_tuple(2)?,
            0x87 => self.push_tuple(3)?,
            b't' | b'l' => {
                let items = self.pop_mark()?;
                self.push_list(items);
            }
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(&items)?;
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
                let (Value::Text(name), Value::Text(module)) = (self.pop()?, self.pop()?) else {
                    return Err("the name of a function is no text".to_owned());
                };
                self.push_global(self.texts[module as usize], self.texts[name as usize])?;
            }
            b'R' => self.call()?,
            b'b' => self.build()?,
            code => return Err(format!("instruction 0x{code:02x} has no place in an array")),
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

    fn unsigned(&mut self, width: usize) -> Step<u64> {
        Ok(integer(self.take(width)?, false) as u64)
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

    fn push_integer(&mut self, width: usize, signed: bool) -> Step<()> {
        let number = integer(self.take(width)?, signed);
        self.stack.push(Value::Int(number));
        Ok(())
    }

    fn push_text(&mut self, width: usize) -> Step<()> {
        let text = std::str::from_utf8(self.prefixed(width)?).map_err(|_| "a text is no UTF-8")?;
        self.stack.push(Value::Text(self.texts.len() as u32));
        self.texts.push(text);
        Ok(())
    }

    fn skip_bytes(&mut self, width: usize) -> Step<()> {
        self.prefixed(width)?;
        self.stack.push(Value::Plain);
        Ok(())
    }

    fn push_list(&mut self, items: Vec<Value>) {
        self.stack.push(Value::List(self.lists.len() as u32));
        self.lists.push(items);
    }

    fn push_tuple(&mut self, count: usize) -> Step<()> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let start = self.stack.len().checked_sub(count).filter(|&start| start >= floor);
        let items = self.stack.split_off(start.ok_or("its stack is empty")?);
        self.push_list(items);
        Ok(())
    }

    fn push_global(&mut self, module: &str, name: &str) -> Step<()> {
        let global = match (module, name) {
            ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct") => {
                Global::Reconstruct
            }
            ("numpy", "ndarray") => Global::Array,
            ("numpy", "dtype") => Global::Dtype,
            ("_codecs", "encode") => Global::Encode,
            _ => {
                let (module, name): (String, String) =
                    (module.chars().take(128).collect(), name.chars().take(128).collect());
                return Err(format!(
                    "it names `{module}.{name}`, which has no place in an array of numbers; \
                     nothing was run"
                ));
            }
        };
        self.stack.push(Value::Global(global));
        Ok(())
    }

    fn top(&self) -> Step<Value> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let above = self.stack.get(floor..).and_then(<[_]>::last);
        above.copied().ok_or("its stack is empty".to_owned())
    }

    fn pop(&mut self) -> Step<Value> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_mark(&mut self) -> Step<Vec<Value>> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    fn append(&mut self, items: &[Value]) -> Step<()> {
        let Value::List(list) = self.top()? else {
            return Err("it appends to what is no list".to_owned());
        };
        self.lists[list as usize].extend_from_slice(items);
        Ok(())
    }

    fn remember(&mut self, key: u64) -> Step<()> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Step<()> {
        let value = self.memo.get(&key).ok_or("it recalls what it never kept")?;
        self.stack.push(*value);
        Ok(())
    }

    fn call(&mut self) -> Step<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let Value::List(_) = arguments else { return Err("arguments are no tuple".to_owned()) };
        let made = match function {
            Value::Global(Global::Reconstruct) => Value::Made(Global::Array),
            Value::Global(Global::Dtype) => Value::Made(Global::Dtype),
            Value::Global(Global::Encode) => Value::Plain,
            _ => return Err("it calls what is no function of an array's".to_owned()),
        };
        self.stack.push(made);
        Ok(())
    }

    /// An array's state is (version, shape, element type, order, elements).
    fn build(&mut self) -> Step<()> {
        let (state, object) = (self.pop()?, self.pop()?);
        let built = match (object, state) {
            (Value::Made(Global::Dtype), _) => object,
            (Value::Made(Global::Array), Value::List(state)) => match self.list(state) {
                [_, _, Value::Made(Global::Dtype), _, Value::List(elements)] => {
                    Value::Array(*elements)
                }
                _ => return Err("an array has not the state that numpy gives it".to_owned()),
            },
            _ => return Err("it sets the state of an object".to_owned()),
        };
        self.stack.push(built);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn npy(kind: &str, shape: &str, body: &[u8]) -> Vec<u8> {
        let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n");
        let length = (header.len() as u16).to_le_bytes();
        [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), body].concat()
    }

    #[test]
    fn whole_numbers_of_every_width_are_read() {
        let read = |kind, body: &[u8]| decode(&npy(kind, "(2,)", body));
        let expected =
            |values: [i64; 2]| Ok(Numbers::Flat { shape: vec![2], values: values.to_vec() });
        assert_eq!(read("|u1", &[1, 255]), expected([1, 255]));
        assert_eq!(read("|i1", &[1, 255]), expected([1, -1]));
        assert_eq!(read("<i4", &[2, 1, 0, 0, 254, 255, 255, 255]), expected([258, -2]));
        assert!(read("<i8", &[0; 15]).expect_err("short").contains("15 bytes"));
        assert!(read("<f4", &[0; 8]).expect_err("floats").contains("`<f4`"));
        assert!(read(">i4", &[0; 8]).is_err());
        let huge = npy("<i8", "(9999999999, 9999999999)", &[]);
        assert!(decode(&huge).is_err());
    }

    #[test]
    fn a_program_that_names_anything_else_is_refused_and_not_run() {
        let body = b"\x80\x03cposix\nsystem\nX\x02\x00\x00\x00id\x85R.";
        let error = decode(&npy("|O", "(1,)", body)).expect_err("a function");
        assert!(error.contains("`posix.system`") && error.contains("nothing was run"), "{error}");
    }

    #[test]
    fn lists_that_are_there_many_times_do_not_multiply() {
        // A list of 200 numbers, remembered, and then a thousand times in the array.
        let mut body =
            b"\x80\x03cnumpy.core.multiarray\n_reconstruct\n)R(K\x01)cnumpy\ndtype\n)RN(".to_vec();
        body.extend(b"](");
        body.extend([b'K', 7].repeat(200));
        body.extend(b"eq\x00");
        body.extend(b"h\x00".repeat(1000));
        body.extend(b"ltb.");
        let error = decode(&npy("|O", "(1001,)", &body)).expect_err("too much");
        assert!(error.contains("refer to each other"), "{error}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            codes in prop::collection::vec(prop::sample::select(
                b".(0NK]()ltaeqhcRb\x85\x86\x94\x93\x8c\x80\x00\x01".to_vec()), 0..80),
        ) {
            let _ = decode(&bytes);
            let _ = decode(&npy("|O", "(1,)", &bytes));
            let _ = decode(&npy("|O", "(1,)", &codes));
            let _ = decode(&npy("<i2", "(3,)", &bytes));
        }
    }
}
