"""What all APIs of chats share: messages, plan, output, items."""
